"""`FlushClock`: when streams are flushed. Those that are due at about the same time are flushed together, by one timer:
what is done in one go is done faster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: What is left to do; it must not raise.
Finish = Callable[[], None]

#: Seconds between two moments at which streams are flushed, where a flush takes twice as long or longer. Of a thousand
#: streams at 250 ms that is a hundred each time, some 10 ms of work.
FLUSH_TICK_S = 0.025


def flush_time(began: float, flush_s: float) -> float:
    """When a stream that was flushed at `began` is flushed next: after `flush_s`, or so much earlier that it is
    together with others."""
    at = began + flush_s
    if flush_s < 2 * FLUSH_TICK_S:
        return at
    tick = at // FLUSH_TICK_S
    together = tick * FLUSH_TICK_S
    return together if together <= at else (tick - 1) * FLUSH_TICK_S


class FlushClock:
    """Calls back in the running loop: one timer for all that are due at the same time, one turn for all that are due
    soon. A callback returns what is left to do once all the others were called, or None: a system call takes from what
    runs after it the caches that it ran in, so that those of all streams come last."""

    def __init__(self) -> None:
        self._due: dict[float, list[Callable[[float], Finish | None]]] = {}
        self._soon: list[Callable[[], Finish | None]] = []

    def call_at(self, when: float, callback: Callable[[float], Finish | None]) -> None:
        """Has `callback`, which must not raise, called with `when` at that time of the loop."""
        waiting = self._due.get(when)
        if waiting is not None:
            waiting.append(callback)
            return
        self._due[when] = [callback]
        asyncio.get_running_loop().call_at(when, self._ring, when)

    def call_soon(self, callback: Callable[[], Finish | None]) -> None:
        """Has `callback`, which must not raise, called in the loop's next turn."""
        self._soon.append(callback)
        if len(self._soon) == 1:
            asyncio.get_running_loop().call_soon(self._ring_soon)

    def _ring(self, when: float) -> None:
        for finish in [callback(when) for callback in self._due.pop(when)]:
            if finish is not None:
                finish()

    def _ring_soon(self) -> None:
        soon, self._soon = self._soon, []
        for finish in [callback() for callback in soon]:
            if finish is not None:
                finish()
