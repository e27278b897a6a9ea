"""A model's tokenizer and renderer for its rollouts: loaded when first asked for, and once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.envs.server.errors import NoTokenizer
from headrace.extras import install_command

if TYPE_CHECKING:
    from headrace.tokens import Renderer, Vocabulary


class Tokenizing:
    """`use` takes the tokenizer that an environment has already; else the configured one is loaded."""

    def __init__(self, model_name: str, tokenizer_name: str = "none") -> None:
        own = tokenizer_name not in ("", "none")
        self._name = tokenizer_name if own else model_name
        self._option = "--openai.tokenizer_name" if own else "--openai.tokenizer_name, taken from model_name:"
        self._tokenizer: Any = None
        self._vocabularies: dict[int, Vocabulary] = {}
        self._renderers: dict[int, Renderer] = {}

    def use(self, tokenizer: Any) -> None:
        if tokenizer is not None:
            self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._name, self._option)
        return self._tokenizer

    def vocabulary(self, tokenizer: Any = None) -> Vocabulary:
        from headrace.tokens import Vocabulary

        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        # A vocabulary holds its tokenizer, so that an id is not given to another one meanwhile.
        if id(tokenizer) not in self._vocabularies:
            self._vocabularies[id(tokenizer)] = Vocabulary(tokenizer)
        return self._vocabularies[id(tokenizer)]

    def renderer(self, tokenizer: Any = None) -> Renderer:
        from headrace.tokens import load_renderer

        vocabulary = self.vocabulary(tokenizer)
        if id(vocabulary) not in self._renderers:
            self._renderers[id(vocabulary)] = load_renderer(vocabulary)
        return self._renderers[id(vocabulary)]

    def prompt_ids(self, text: str, tokenizer: Any = None) -> list[int]:
        """A text prompt's ids. A chat template writes a begin-of-text, and tokenizers add one: one is enough."""
        vocabulary = self.vocabulary(tokenizer)
        ids = vocabulary.encode_prompt(text)
        if len(ids) > 1 and ids[0] == ids[1] == vocabulary.hf.bos_token_id:
            return ids[1:]
        return ids


def load_tokenizer(name: str, option: str) -> Any:
    """The tokenizer in a folder, or of a name on the hub. `option` is where the name was said, for the error."""
    path = Path(name).expanduser()
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or not name):
        raise NoTokenizer(f"{option} {name!r}: there is no such folder; name one with a tokenizer, or a model's")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise NoTokenizer(f"the tokenizer {name!r} needs transformers: {install_command('tokens')}") from error
    try:
        return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except (OSError, ValueError) as error:
        where = "the folder holds no tokenizer" if path.is_dir() else "no folder here, and not to be had from the hub"
        raise NoTokenizer(f"{option} {name!r}: {where}: {error}") from error
