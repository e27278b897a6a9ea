"""Which games are played next, and when: never more than the trainer is about to want.

A group is open from its first game until its last one ended; then it waits in the pool until the trainer takes it. Open
and waiting groups together are at most `ahead`: with as many as a batch has, the next batch is played while the trainer
learns from the last one, and no batch is more than one version old.

What waits is asked of the pool, and only when that would decide whether a group may be opened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

__all__ = ["Supply"]

#: Seconds between two questions while nothing may be opened.
POLL_S = 0.02


@dataclass(slots=True)
class Open:
    """A group that is being played."""

    left: int
    whole: bool = True


class Supply:
    """Hands out games as (group, rollout)."""

    def __init__(self, first: int, rollouts: int, ahead: int, waiting: Callable[[], Awaitable[int]]) -> None:
        """`waiting` asks how many groups are ready in the pool and not taken yet."""
        self.next = first
        self._rollouts = rollouts
        self._ahead = ahead
        self._ask = waiting
        self._waiting = ahead  # not known yet
        self._open: dict[int, Open] = {}
        self._games: deque[tuple[int, int]] = deque()
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[int, int]:
        """The next game, as soon as it may begin."""
        async with self._turn:
            while not self._games:
                if len(self._open) + self._waiting < self._ahead:
                    self._begin()
                    break
                self._waiting = await self._ask()
                if len(self._open) + self._waiting >= self._ahead:
                    await asyncio.sleep(POLL_S)
            return self._games.popleft()

    def ended(self, group: int, *, kept: bool) -> None:
        """A game is over; a group with one that was given up will never be ready."""
        found = self._open[group]
        found.left -= 1
        found.whole &= kept
        if not found.left:
            del self._open[group]
            self._waiting += found.whole

    def _begin(self) -> None:
        group, self.next = self.next, self.next + 1
        self._open[group] = Open(self._rollouts)
        self._games.extend((group, rollout) for rollout in range(self._rollouts))
