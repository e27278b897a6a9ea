"""The tokenizer as the `renderers` library needs it: ids from text, and nothing in between.

The library encodes the same few role headers and markers in every call, through a wrapper that takes longer than the
encoding. Here short texts are remembered and long ones go to the tokenizer itself. Character offsets, which the library
would use to say which token came from which message, are not offered: nobody here asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from headrace.tokens.vocabulary import Vocabulary

#: Characters of a text that is worth remembering, and how many of them are.
SHORT, REMEMBERED = 48, 4096


class LeanTokenizer:
    """What the library calls; everything else is the transformers tokenizer's."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._short = lru_cache(REMEMBERED)(lambda text: tuple(vocabulary.encode(text)))
        self._id = lru_cache(REMEMBERED)(vocabulary.hf.convert_tokens_to_ids)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if add_special_tokens or options:
            found: list[int] = self._vocabulary.hf.encode(text, add_special_tokens=add_special_tokens, **options)
            return found
        return list(self._short(text)) if len(text) <= SHORT else self._vocabulary.encode(text)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._vocabulary.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._id(tokens) if isinstance(tokens, str) else self._vocabulary.hf.convert_tokens_to_ids(tokens)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)  # calling it would mean offsets
        return getattr(self._vocabulary.hf, name)
