"""What the items of an answer are called: by their kind, the call that gave them, and their number in it.

A later request may refer to an item by its name alone, so a name says where to find it.
"""

from __future__ import annotations

import re
from typing import Literal, Self

import msgspec

Kind = Literal["rs", "msg", "fc"]

#: Call ids are hexadecimal; no answer has a million items.
_NAME = re.compile(r"(rs|msg|fc)_([0-9a-f]+)(?:_([0-9]{1,6}))?")


class ItemName(msgspec.Struct, frozen=True):
    """Reasoning (`rs`), a text (`msg`) or a function call (`fc`) of the answer that `call` got."""

    kind: Kind
    call: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}_{self.call}" + (f"_{self.number}" if self.number or self.kind == "fc" else "")

    @classmethod
    def read(cls, given: str) -> Self | None:
        """The name that a text is; None where no item is ever called so."""
        found = _NAME.fullmatch(given)
        if found is None:
            return None
        name = cls(found[1], found[2], int(found[3] or 0))  # type: ignore[arg-type]
        return name if str(name) == given else None
