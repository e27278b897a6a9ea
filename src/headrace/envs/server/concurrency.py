"""One server's limits and statistics: how many calls may be in flight, what they took, and a signal that wakes waiters.

`Concurrency` learns its limit from how calls end and is pure: no task, no clock, no lock. It begins at the configured
maximum. A call that the server was too busy for halves the limit; a limit's worth of successful calls raises it by
one. A burst of refusals counts once: only calls that began after the last cut can cut again. The environment's weight
scales the limit, and one call is always allowed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np

from headrace.data.errors import InvalidInput


class Signal:
    """A wake-up without a state: `fire` wakes those who wait at that moment, and nobody who comes later."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wakes everyone who waits at this moment."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    @staticmethod
    async def any_of(signals: Sequence[Signal]) -> None:
        """Returns once one of the signals fires."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for signal in signals:
            signal._waiting.add(future)
        try:
            await future
        finally:
            for signal in signals:
                signal._waiting.discard(future)


#: `ok`; `overloaded`: the server refused the call or timed out; `other`: an end that says nothing of its load.
CallOutcome = Literal["ok", "overloaded", "other"]
#: What the limit is multiplied by when a call ends as overloaded.
OVERLOAD_FACTOR = 0.5


class Concurrency:
    """The limit of calls in flight of one server and one split: `most` is its maximum, `allowed` the one that holds."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise InvalidInput(f"the most calls in flight is {most}; it must be at least 1")
        self.most = most
        self.in_flight = 0
        self.weight = 1.0
        self._limit = float(most)
        self._cuts = 0

    @property
    def allowed(self) -> int:
        """Most calls in flight, given how the server coped and the weight; at least one."""
        return max(1, int(self._limit * self.weight))

    @property
    def free(self) -> int:
        """Calls that may start."""
        return max(0, self.allowed - self.in_flight)

    def weigh(self, weight: float) -> None:
        """Sets the share of the limit that may be used, from 0 to 1; else raises `InvalidInput`."""
        if not 0 <= weight <= 1:
            raise InvalidInput(f"weight is {weight}; it must lie in 0..1")
        self.weight = weight

    def begin(self) -> int:
        """Counts a call that starts; what it returns is passed to `end`."""
        self.in_flight += 1
        return self._cuts

    def end(self, began: int, outcome: CallOutcome) -> None:
        """Counts a call that ended, and adapts the limit to how it did."""
        used = self.in_flight
        self.in_flight -= 1
        if outcome == "overloaded" and began == self._cuts:
            self._limit = max(1.0, self._limit * OVERLOAD_FACTOR)
            self._cuts += 1
        elif outcome == "ok" and 2 * used >= self.allowed:  # a limit that is not nearly reached is not raised
            self._limit = min(float(self.most), self._limit + 1 / self._limit)


class Statistics:
    """Durations and attempts of the latest calls of one split to one server."""

    def __init__(self, length: int) -> None:
        self.timings: deque[float] = deque(maxlen=length)
        self.attempts: deque[int] = deque(maxlen=length)

    def add(self, seconds: float, attempts: int) -> None:
        """Adds a call."""
        self.timings.append(seconds)
        self.attempts.append(attempts)

    def metrics(self, name: str, attempts_name: str) -> dict[str, float]:
        """Mean, deviation and 99th percentile of the durations, and the mean of attempts; empty before a call."""

        if not self.timings:
            return {}
        timings = np.asarray(self.timings)
        return {
            f"{name}_time_avg": float(timings.mean()),
            f"{name}_time_std": float(timings.std()),
            f"{name}_time_99p": float(np.percentile(timings, 99)),
            attempts_name: float(np.mean(self.attempts)),
        }
