"""How far a run is (`RunProgress`): the trainer's metrics, read from its folder as they grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

METRICS = "metrics.jsonl"
#: Steps that a reward is told as the mean of: a single step's is mostly chance.
WINDOW = 10


class RunProgress:
    """`rows` has one object for each step; `refresh` reads what is new."""

    def __init__(self, trainer: Path) -> None:
        """`trainer` is the trainer's folder, which need not be there yet."""
        self._metrics = trainer / METRICS
        self._read = 0
        self.rows: list[dict[str, Any]] = []

    def refresh(self) -> bool:
        """Reads what was written since the last call; returns whether a step was added."""
        try:
            with self._metrics.open("rb") as file:
                if file.seek(0, 2) < self._read:  # a resumed trainer has cut what came after its checkpoint
                    self._read, self.rows = 0, []
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        new = [orjson.loads(line) for line in whole.splitlines()]
        self.rows += new
        return bool(new)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step that had one."""
        return [row["reward"] for row in self.rows if row["reward"] is not None]

    @property
    def reward_start(self) -> float | None:
        """The mean reward of the first steps: half a window, so that little of it is learned already."""
        first = self.rewards[: WINDOW // 2]
        return sum(first) / len(first) if first else None

    @property
    def reward_end(self) -> float | None:
        """The mean reward of the last steps."""
        curve = averaged(self.rewards[-WINDOW:])
        return curve[-1] if curve else None

    def mean(self, name: str) -> float | None:
        """The mean of a metric over the steps that have it."""
        found = [row[name] for row in self.rows if row.get(name) is not None]
        return sum(found) / len(found) if found else None

    def most(self, name: str) -> float | None:
        """The largest value of a metric."""
        return max((row[name] for row in self.rows if row.get(name) is not None), default=None)


def averaged(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The moving average: of the last `window` values, or of as many as there are."""
    found = []
    for end in range(1, len(values) + 1):
        part = values[max(end - window, 0) : end]
        found.append(sum(part) / len(part))
    return found


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value of an axis: 0 and 1, or whole numbers further out where values are."""
    found = [value for value in values if math.isfinite(value)]
    return float(min([0, *(math.floor(value) for value in found)])), float(max([1, *(math.ceil(v) for v in found)]))


def rounded(value: float | None) -> float | None:
    """Four digits, as results are told."""
    return None if value is None else round(value, 4)


def reward_text(reward: float | None) -> str:
    """A reward in a sentence; where there is none, a dash."""
    return "-" if reward is None else f"{reward:.3f}"
