"""Which JSON values everybody can pass on. A model writes others too, and a call with one of those is no call."""

from __future__ import annotations

import math
from typing import Any

#: How deep a value may nest.
MOST_NESTED = 100


def sound(value: Any) -> bool:
    """Whether a value can be written again as it was: nothing infinite, no half a character, not nested too deep."""
    left: list[tuple[Any, int]] = [(value, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
                return False
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, dict | list):
            if depth == MOST_NESTED:
                return False
            inner = (*item, *item.values()) if isinstance(item, dict) else item
            left += [(each, depth + 1) for each in inner]
    return True
