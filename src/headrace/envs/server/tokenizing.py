"""A model's tokenizer and renderer for its rollouts: loaded when first asked for, and once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.data.errors import InvalidInput
from headrace.extras import install_command

if TYPE_CHECKING:
    from headrace.tokens import Renderer, Vocabulary


class Tokenizing:
    """`use` takes the tokenizer that an environment has already; else the configured one is loaded."""

    def __init__(self, model_name: str, tokenizer_name: str = "none") -> None:
        self._name = model_name if tokenizer_name in ("", "none") else tokenizer_name
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
            self._tokenizer = _load(self._name)
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


def _load(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InvalidInput(f"the tokenizer {name!r} needs transformers: {install_command('tokens')}") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"no tokenizer could be loaded for {name!r}: {error}; set tokenizer_name to a model's folder or its name"
        ) from error
