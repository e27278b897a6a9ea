"""A tokenizer, and the text of each single token."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Vocabulary:
    """`tokenizer` is transformers'; `inner` decodes faster where there is a Rust one behind it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.inner: Any = getattr(self.tokenizer, "backend_tokenizer", self.tokenizer)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = str(self.inner.decode([token], skip_special_tokens=False))
        return found

    def encode(self, text: str, *, special: bool) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return found

    def decode(self, tokens: list[int]) -> str:
        return str(self.inner.decode(tokens, skip_special_tokens=False))

    def pieces(self, tokens: list[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        found: list[str] = self.tokenizer.convert_ids_to_tokens(tokens)
        return found
