"""Conversations that end because nobody called for so long: one timer, on a monotonic clock.

Where other processes write to the same pool, a conversation that grew since this one last looked is theirs to end: it
is looked at again after as long. One without any answer is no rollout; it is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from headrace.data.errors import HeadraceError
from headrace.gateway.gateway import Gateway
from headrace.gateway.per_model import PerModelTrajectories
from headrace.pool.embedded import DataPool

log = logging.getLogger("headrace.gateway")

#: The timer's shortest wait, in seconds: many that end at about the same time are ended at once.
MIN_SWEEP_S = 1.0


class IdleClock:
    """When each conversation was last called. Pure: time is an argument, and only ever goes on."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._last: OrderedDict[str, float] = OrderedDict()  # the quietest first

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, uid: str) -> bool:
        return uid in self._last

    def touch(self, uid: str, now: float) -> None:
        """Notes a call at `now`."""
        self._last[uid] = now
        self._last.move_to_end(uid)

    def drop(self, uid: str) -> None:
        """Forgets a conversation, if it is known."""
        self._last.pop(uid, None)

    def due(self, now: float) -> list[str]:
        """The conversations that were not called for `after_s`, the quietest first."""
        found: list[str] = []
        for uid, last in self._last.items():
            if now - last < self.after_s:
                break
            found.append(uid)
        return found

    def is_due(self, uid: str, now: float) -> bool:
        """Whether a conversation is known and was not called for `after_s`."""
        return uid in self._last and now - self._last[uid] >= self.after_s

    def wait(self, now: float) -> float:
        """Seconds until the next can be due."""
        last = next(iter(self._last.values()), now)
        return max(0.0, last + self.after_s - now)


class IdleEndings:
    """Watches the conversations of a live service, and ends those that are idle."""

    def __init__(self, gateway: Gateway, after_s: float, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self._per_model = PerModelTrajectories(gateway)
        self._shared = not isinstance(gateway.pool, DataPool)
        self._clock = clock
        self._idle = IdleClock(after_s)
        self._under_way: Counter[str] = Counter()
        self._ending: set[str] = set()
        self._seen: dict[str, int] = {}  # how many steps there were when it was last looked at

    def __contains__(self, held: str) -> bool:
        """Whether a conversation is watched."""
        return held in self._idle

    def __len__(self) -> int:
        return len(self._idle)

    def is_ending(self, held: str) -> bool:
        """No call may join it any more."""
        return held in self._ending

    def watch(self, held: str) -> None:
        """Counts a conversation's idle time from now on."""
        self._idle.touch(held, self._clock())

    def enter(self, held: str) -> None:
        """A call begins; while it is under way, its conversation does not end."""
        self._under_way[held] += 1
        self.watch(held)

    def leave(self, held: str) -> None:
        """A call that entered is over."""
        self._under_way[held] -= 1
        if not self._under_way[held]:
            del self._under_way[held]
        if held in self._idle:
            self.watch(held)

    def drop(self, held: str) -> None:
        """Stops watching a conversation."""
        self._idle.drop(held)
        self._seen.pop(held, None)

    async def run(self, look: Callable[[], Awaitable[bool]]) -> None:
        """The timer. `look` finds what was in the pool at the start, and says whether all of it is watched now."""
        while True:
            wait = self._idle.wait(self._clock()) if await look() else 0.0
            await asyncio.sleep(max(MIN_SWEEP_S, wait))
            await self.sweep()

    async def sweep(self) -> None:
        """Ends the conversations that are idle and have no call under way."""
        for held in self._idle.due(self._clock()):
            if not self._idle.is_due(held, self._clock()):
                continue  # it was called while others were ended
            if self._under_way[held]:
                self.watch(held)
                continue
            self._ending.add(held)
            try:
                await self._end(held)
            except HeadraceError as error:
                log.warning("conversation %r could not be ended, and is tried again: %s", held, error)
                self.watch(held)
            finally:
                self._ending.discard(held)

    async def abandon(self, held: str) -> None:
        """Forgets a conversation whose first call failed, unless others joined it. What is left is ended as idle."""
        if self._under_way[held]:
            return
        try:
            if not await self._steps(held):
                await self._forget(held, "empty")
        except HeadraceError as error:
            log.warning("conversation %r could not be forgotten: %s", held, error)

    async def _end(self, held: str) -> None:
        gateway = self._gateway
        steps = await self._steps(held)
        if self._shared and self._seen.get(held) != steps:
            self._seen[held] = steps
            self.watch(held)
            return
        if not steps:
            await self._forget(held, "empty")
            return
        await self._per_model.complete(held, None)
        gateway.counters.add("conversations", "idle")
        await gateway.forget(held)

    async def _forget(self, held: str, why: str) -> None:
        for model in self._gateway.models:
            await self._gateway.pool.aio.forget(model.uid_of(held), erase=False)  # nobody asked for that
        self._gateway.counters.add("conversations", why)
        await self._gateway.forget(held)

    async def _steps(self, held: str) -> int:
        await self._gateway.flushed(held)
        counts = [await self._per_model.steps(model.uid_of(held)) for model in self._gateway.models]
        return sum(count or 0 for count in counts)
