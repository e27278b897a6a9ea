"""`TextKey`: what the text of a completion, prompt and answer, is known by; small enough for a step's metadata."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

DIGEST = 16
#: Bytes of a text after which the digest of its beginning can be looked up.
CHUNK = 256


class TextKey(msgspec.Struct, frozen=True):
    """Its length in characters and its digest; for who looks it up among many, also the digest of its whole chunks,
    `anchor`, and how many bytes follow them."""

    length: int
    digest: str
    anchor: str
    tail: int

    @classmethod
    def of(cls, text: str) -> TextKey:
        data = text.encode()
        tail = len(data) % CHUNK
        hasher = blake2b(data[: len(data) - tail], digest_size=DIGEST)
        anchor = hasher.hexdigest()
        hasher.update(data[len(data) - tail :])
        return cls(len(text), hasher.hexdigest(), anchor, tail)

    @classmethod
    def from_metadata(cls, given: Any) -> TextKey | None:
        """None where a flow wrote something of its own there."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError:
            return None
