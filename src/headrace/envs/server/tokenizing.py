"""The tokenizer and renderer of one model, each loaded once, when first used.

A fast tokenizer of transformers' becomes a `Vocabulary`, and its chat template has a renderer. Any other object with
the methods of `Tokenizer` works too: its texts are encoded and decoded by those methods alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from headrace.data.errors import InvalidInput
from headrace.envs.server.responses import NoTokenizer
from headrace.extras import install_command
from headrace.files import expanded
from headrace.tokens import Renderer, Vocabulary, load_renderer


class Tokenizer(Protocol):
    """What a managed conversation needs of a tokenizer; `apply_chat_template` for messages only."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


REQUIRED_METHODS = (
    "encode(text, add_special_tokens=...), decode(ids, skip_special_tokens=...) and, for messages, "
    "apply_chat_template(messages, tokenize=False, add_generation_prompt=...)"
)


class PlainVocabulary:
    """A tokenizer by its methods alone, in the shape of a `Vocabulary`. Raises `InvalidInput` where one is missing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.hf = tokenizer
        self._need("encode")
        self._need("decode")

    def encode(self, text: str) -> list[int]:
        """A text's ids, without special tokens around it."""
        return list(self.hf.encode(text, add_special_tokens=False))

    def encode_after(self, text: str) -> list[int]:
        """The ids of a text that goes on where another ended; how that differs, the methods do not say."""
        return self.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens that the tokenizer adds."""
        return list(self.hf.encode(text, add_special_tokens=True))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids."""
        return str(self.hf.decode(list(ids), skip_special_tokens=skip_special))

    def decode_after(self, prompt: Sequence[int], ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids that follow a prompt; how that differs, the methods do not say."""
        return self.decode(ids, skip_special=skip_special)

    def written(self, messages: list[dict[str, Any]]) -> str:
        """A conversation as the template renders it: up to the answer, or to the end of a partial one."""
        self._need("apply_chat_template")
        begun = messages[-1].get("role") == "assistant"
        return str(self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=not begun))

    def _need(self, name: str) -> None:
        if not callable(getattr(self.hf, name, None)):
            raise InvalidInput(
                f"{type(self.hf).__name__} has no {name}; a managed conversation needs {REQUIRED_METHODS}"
            )


class Tokenizing:
    """One model's tokenizer: the one that `use` was given, or the configured one, loaded when first needed."""

    def __init__(self, model_name: str, tokenizer_name: str = "none") -> None:
        own = tokenizer_name not in ("", "none")
        self._name = tokenizer_name if own else model_name
        self._option = "--openai.tokenizer_name" if own else "--openai.tokenizer_name, taken from model_name:"
        self._tokenizer: Any = None
        self._vocabularies: dict[int, Vocabulary | PlainVocabulary] = {}
        self._renderers: dict[int, Renderer] = {}

    def use(self, tokenizer: Any) -> None:
        """Takes this tokenizer in place of the configured one; None changes nothing."""
        if tokenizer is not None:
            self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        """Whether a tokenizer was given or loaded."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded where none was given. Raises `NoTokenizer`."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._name, self._option)
        return self._tokenizer

    def vocabulary(self, tokenizer: Any = None) -> Vocabulary | PlainVocabulary:
        """The vocabulary of a tokenizer, by default of this model's."""
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        # A vocabulary holds its tokenizer, so that its id() cannot become another object's.
        if id(tokenizer) not in self._vocabularies:
            fast = getattr(tokenizer, "backend_tokenizer", None) is not None
            self._vocabularies[id(tokenizer)] = Vocabulary(tokenizer) if fast else PlainVocabulary(tokenizer)
        return self._vocabularies[id(tokenizer)]

    def renderer(self, vocabulary: Vocabulary) -> Renderer:
        """The renderer of a vocabulary's chat template, made once."""

        if id(vocabulary) not in self._renderers:
            self._renderers[id(vocabulary)] = load_renderer(vocabulary)
        return self._renderers[id(vocabulary)]

    def prompt_ids(self, text: str, tokenizer: Any = None) -> list[int]:
        """A text prompt's ids, with one begin-of-text where both a chat template and the tokenizer wrote one."""
        vocabulary = self.vocabulary(tokenizer)
        ids = vocabulary.encode_prompt(text)
        if len(ids) > 1 and ids[0] == ids[1] == getattr(vocabulary.hf, "bos_token_id", None):
            return ids[1:]
        return ids


def load_tokenizer(name: str, option: str) -> Any:
    """Loads a tokenizer from a folder or by its name on the hub; raises `NoTokenizer`, which names the `option`."""
    path = expanded(name)
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
