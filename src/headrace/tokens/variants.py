"""Renderers under other template options: made when first asked for, the ones used last kept.

Options come from agents, so their number must not be an agent's to choose.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

MOST = 32

R = TypeVar("R")


class Variants(Generic[R]):
    def __init__(self) -> None:
        self._known: OrderedDict[str, R] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, options: Mapping[str, Any], make: Callable[[], R]) -> R:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        found = self._known.pop(key, None)
        self._known[key] = found = make() if found is None else found
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return found
