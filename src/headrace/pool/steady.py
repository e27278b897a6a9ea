"""A pool's time: the wall clock's, but never behind what it was before.

A clock that is set back, while the pool runs or between two runs, is followed from there on: facts come one after the
other, and a deadline that was ten seconds away stays so.
"""

from __future__ import annotations

from collections.abc import Callable


class Steady:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0.0  # what the clock said last
        self._ahead = 0.0  # by how much this is ahead of it

    def now(self) -> float:
        """Asked by one thread at a time."""
        wall = self._clock()
        self._ahead += max(0.0, self._last - wall)
        self._last = wall
        return wall + self._ahead

    def after(self, moment: float) -> None:
        """Goes on from a moment of an earlier run, where the clock has not come to it again."""
        self._last = max(self._last, moment)

    def until(self, moment: float) -> float:
        """Seconds to a moment; asked by any thread."""
        return moment - self._ahead - self._clock()
