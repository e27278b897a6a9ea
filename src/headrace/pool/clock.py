"""A pool's time: the wall clock's, but never behind what it was before; and by how much it was set forward.

A clock that is set back, while the pool runs or between two runs, is followed from there on: facts come one after the
other, and a deadline that was ten seconds away stays so. One that is set forward is followed at once, since people read
these times; `jumped` says by how much, and whoever keeps deadlines moves them by as much. So they go by the monotonic
clock, whatever the other one does.
"""

from __future__ import annotations

from collections.abc import Callable

#: Seconds by which the wall clock may get ahead of the monotonic one between two calls without having been set. A clock
#: that is being corrected gently gains half a second in a quarter of an hour.
JUMP_S = 1.0
#: Seconds between two runs that count as time. More of them are a clock that was set, or a pool that was away for long;
#: nothing tells which, and who holds a lease could do nothing about either.
AWAY_S = 60.0


class MonotonicClock:
    """The time by `clock`. `monotonic`: seconds that pass in any case; without it, `clock` is never set forward."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._last = 0.0  # what the clock said last; 0: it was not asked yet
        self._passed = monotonic() if monotonic is not None else 0.0  # what the monotonic one said then
        self._resumed = False  # the clock said that in an earlier run
        self._ahead = 0.0  # by how much this is ahead of the clock
        self._jump = 0.0  # by how much the clock was set forward since somebody asked

    def now(self) -> float:
        """Asked by one thread at a time."""
        wall = self._clock()
        gained, most = self._gained(wall), AWAY_S if self._resumed else JUMP_S
        if gained > most:
            back = min(self._ahead, gained)  # it was set back before: that is made up for first
            self._ahead -= back
            self._jump += gained - back
        elif gained < -JUMP_S:
            self._ahead -= gained
        else:
            self._ahead += max(0.0, self._last - wall)
        self._last, self._resumed = wall, False
        return wall + self._ahead

    def _gained(self, wall: float) -> float:
        """Seconds by which the clock got ahead of the monotonic one since it was asked last."""
        if self._monotonic is None:
            return 0.0
        before, self._passed = self._passed, self._monotonic()
        return wall - self._last - (self._passed - before) if self._last else 0.0

    def jumped(self) -> float:
        """By how much the clock was set forward since this was asked last."""
        jump, self._jump = self._jump, 0.0
        return jump

    def after(self, moment: float) -> None:
        """Goes on from a moment of an earlier run."""
        if moment > self._last:
            self._last, self._resumed = moment, True

    def until(self, moment: float) -> float:
        """Seconds to a moment; asked by any thread."""
        return moment - self._ahead - self._clock()
