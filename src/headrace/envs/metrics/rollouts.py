"""The table of rollouts: what was said, and the score it got."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace.metrics import Table

COLUMNS = ("text", "score")


def table(groups: Iterable[Sequence[tuple[Any, ...]]]) -> Table:
    """Rollouts that an override kept with more than text and score are shown by these two."""
    shown = Table(COLUMNS)
    for group in groups:
        for rollout in group:
            shown.add_data(*rollout[: len(COLUMNS)])
    return shown
