"""A table among metrics, such as rollouts with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Table:
    """Columns, and rows of them. wandb shows it as a table of its own, JSON lines hold it whole."""

    columns: Sequence[str]
    data: list[tuple[Any, ...]] = field(default_factory=list)

    def add_data(self, *row: Any) -> None:
        if len(row) != len(self.columns):
            raise ValueError(f"a row of {len(row)} values in a table of {len(self.columns)}: {', '.join(self.columns)}")
        self.data.append(row)
