"""How many calls one server may have in flight, learned from how they end. Pure: no task, no clock, no lock.

It begins with all that is configured. A call that the server was too busy for halves the limit; a limit's worth of
calls that went well raises it by one. A burst of refusals is one piece of news: only calls that began after the last
cut can cut again. The weight of an environment scales what is left, and one call is always allowed.
"""

from __future__ import annotations

from typing import Literal

from headrace.data.errors import InvalidInput

#: `well`; `overloaded`: the server refused or did not get to it; `other`: an end that says nothing of its load.
Outcome = Literal["well", "overloaded", "other"]
CUT = 0.5


class Concurrency:
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
        return max(1, int(self._limit * self.weight))

    @property
    def free(self) -> int:
        return max(0, self.allowed - self.in_flight)

    def weigh(self, weight: float) -> None:
        if not 0 <= weight <= 1:
            raise InvalidInput(f"weight is {weight}; it must lie in 0..1")
        self.weight = weight

    def begin(self) -> int:
        """A call that starts; `end` wants back what this gives."""
        self.in_flight += 1
        return self._cuts

    def end(self, began: int, outcome: Outcome) -> None:
        used = self.in_flight
        self.in_flight -= 1
        if outcome == "overloaded" and began == self._cuts:
            self._limit = max(1.0, self._limit * CUT)
            self._cuts += 1
        elif outcome == "well" and 2 * used >= self.allowed:  # a limit that nobody comes near is not tried
            self._limit = min(float(self.most), self._limit + 1 / self._limit)
