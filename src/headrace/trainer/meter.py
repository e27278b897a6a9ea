"""Numbers of one step, gathered over its forward passes and read once at the end, so that no pass waits for them."""

from __future__ import annotations

import torch
from torch import Tensor


class Meter:
    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._means: dict[str, list[tuple[Tensor, int]]] = {}
        self._most: dict[str, list[Tensor]] = {}
        self._last: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._updates = 0

    def add(self, name: str, value: Tensor) -> None:
        """A part of what an update sums up; read as the mean over updates."""
        self._sums.setdefault(name, []).append(value.detach())

    def mean(self, name: str, values: Tensor) -> None:
        """Every value counts alike, whichever pass it is of."""
        if values.numel():
            self._means.setdefault(name, []).append((values.detach().float().sum(), values.numel()))

    def most(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._most.setdefault(name, []).append(values.detach().max())

    def range(self, name: str, values: Tensor) -> None:
        self.most(f"{name}_max", values)
        self.most(f"{name}_min", -values)

    def last(self, name: str, value: Tensor) -> None:
        self._last[name] = value.detach()

    def count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def updated(self) -> None:
        self._updates += 1

    def read(self) -> dict[str, float]:
        updates = max(self._updates, 1)
        found = {name: float(torch.stack(values).sum()) / updates for name, values in self._sums.items()}
        for name, parts in self._means.items():
            total = torch.stack([part for part, _ in parts]).sum()
            found[name] = float(total) / sum(count for _, count in parts)
        for name, values in self._most.items():
            most = float(torch.stack(values).max())
            found[name] = -most if name.endswith("_min") else most
        return {
            **found,
            **{name: float(value) for name, value in self._last.items()},
            **self._counts,
            "updates": self._updates,
        }
