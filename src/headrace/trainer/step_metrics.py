"""The metrics of one learning step, over its forward passes and over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.ranks import ALONE, Ranks


class MetricAccumulator:
    """Metrics of one step, accumulated over its forward passes and read once at the end, so that no pass waits for the
    device."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._means: dict[str, list[tuple[Tensor, int]]] = {}
        self._most: dict[str, list[Tensor]] = {}
        self._last: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._updates = 0

    def add(self, name: str, value: Tensor) -> None:
        """A part of an update's sum; read as the mean over updates."""
        self._sums.setdefault(name, []).append(value.detach())

    def mean(self, name: str, values: Tensor) -> None:
        """Values of which the mean over all passes is read."""
        if values.numel():
            self._means.setdefault(name, []).append((values.detach().float().sum(), values.numel()))

    def most(self, name: str, values: Tensor) -> None:
        """Values of which the largest is read."""
        if values.numel():
            self._most.setdefault(name, []).append(values.detach().max())

    def range(self, name: str, values: Tensor) -> None:
        """Values of which the extremes are read, as `NAME_min` and `NAME_max`."""
        self.most(f"{name}_max", values)
        self.most(f"{name}_min", -values)

    def last(self, name: str, value: Tensor) -> None:
        """A value that replaces the one before."""
        self._last[name] = value.detach()

    def count(self, name: str) -> None:
        """Adds one to a counter."""
        self._counts[name] = self._counts.get(name, 0) + 1

    def updated(self) -> None:
        """Counts an update of the weights."""
        self._updates += 1

    def read(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Every metric by its name over all ranks, and `updates`."""
        updates = max(self._updates, 1)
        sums = {name: float(torch.stack(values).sum()) for name, values in self._sums.items()}
        means = {
            name: (float(torch.stack([part for part, _ in parts]).sum()), sum(count for _, count in parts))
            for name, parts in self._means.items()
        }
        most = {name: float(torch.stack(values).max()) for name, values in self._most.items()}
        every = ranks.exchange((sums, means, most))
        found = {name: sum(part[name] for part in parts) / updates for name, parts in _by_name(every, 0)}
        for name, parts in _by_name(every, 1):
            found[name] = sum(part[name][0] for part in parts) / sum(part[name][1] for part in parts)
        for name, parts in _by_name(every, 2):
            extreme = max(part[name] for part in parts)
            found[name] = -extreme if name.endswith("_min") else extreme
        return {
            **found,
            **{name: float(value) for name, value in self._last.items()},
            **self._counts,
            "updates": self._updates,
        }


def _by_name(every: Seq[tuple[dict[str, Any], ...]], kind: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each name of a kind of metrics, with those ranks' that have it."""
    for name in dict.fromkeys(name for rank in every for name in rank[kind]):
        yield name, [rank[kind] for rank in every if name in rank[kind]]
