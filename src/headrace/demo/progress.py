"""How far a run is: the trainer's metrics and the agents' counters, read from the run's folder as they grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from headrace.demo import counters
from headrace.demo.games import Game, last_games
from headrace.demo.recipe import BAR, WINDOW

__all__ = ["Progress", "averaged"]

METRICS = "metrics.jsonl"
#: Steps that the curve's speed is taken over: fewer are mostly chance.
SPEED_STEPS = 2 * WINDOW
#: What the moving average must have risen in that time before its speed says anything.
RISE = 0.03


class Progress:
    """`rows` is one object a step; `refresh` reads what is new."""

    def __init__(self, run: Path, trainer: Path) -> None:
        self._run = run
        self._metrics = trainer / METRICS
        self._read = 0
        self.rows: list[dict[str, Any]] = []
        self.counters = counters.read(run)
        #: One of the last games that ended.
        self.game: Game | None = None

    def refresh(self) -> bool:
        """Whether a step was added."""
        self.counters = counters.read(self._run)
        self.game = next(iter(last_games(self._run, 1)), self.game)
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
        return [row["reward"] for row in self.rows if row["reward"] is not None]

    @property
    def learned(self) -> bool:
        """Whether the moving average has reached the bar."""
        return len(self.rewards) >= WINDOW and averaged(self.rewards[-WINDOW:])[-1] >= BAR

    def seconds_left(self, most: int) -> float | None:
        """How long it takes until the bar is reached, or all of `most` steps are made, if the curve rises as it has of
        late; None while that cannot be known."""
        curve = averaged(self.rewards)
        if len(curve) <= SPEED_STEPS:
            return None
        seconds: list[float] = [row["seconds"] for row in self.rows[-SPEED_STEPS:] if row.get("seconds") is not None]
        rise = curve[-1] - curve[-1 - SPEED_STEPS]
        if rise < RISE or not seconds:
            return None
        steps = max(BAR - curve[-1], 0.0) * SPEED_STEPS / rise
        return min(steps, most - len(self.rows)) * sum(seconds) / len(seconds)

    def mean(self, name: str) -> float | None:
        found = [row[name] for row in self.rows if row.get(name) is not None]
        return sum(found) / len(found) if found else None

    def most(self, name: str) -> float | None:
        return max((row[name] for row in self.rows if row.get(name) is not None), default=None)


def averaged(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The moving average: of the last `window` values, or of as many as there are."""
    found = []
    for end in range(1, len(values) + 1):
        part = values[max(end - window, 0) : end]
        found.append(sum(part) / len(part))
    return found
