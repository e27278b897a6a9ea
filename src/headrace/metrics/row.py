"""A row of metrics: names and values, with the `step` that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Row = dict[str, Any]


class Writer(Protocol):
    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, those of its parts by names such as `times/wait`."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = value
        elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy's or of torch's
            found[prefix + name] = value.item()
    return found
