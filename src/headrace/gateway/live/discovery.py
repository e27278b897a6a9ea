"""What conversations are in the pool: those of a process that is gone, and those that other processes serve.

A conversation is a group of its own, and groups have numbers that grow: each look reads only what came since the last,
and what had no answer then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.data.errors import HeadraceError
from headrace.data.trajectory import Trajectory
from headrace.gateway.gateway import Gateway
from headrace.gateway.live.names import is_live
from headrace.pool.errors import NotFound

#: Seconds that a call waits for the pool to say which conversations there are.
PATIENCE_S = 5.0
#: Groups that are listed at a time.
PAGE = 1_000

log = logging.getLogger("headrace.gateway")

#: Told of each running conversation: its name in the pool, and the trajectories that hold its steps, by model.
Tell = Callable[[str, list[Trajectory]], None]


class Discovery:
    def __init__(self, gateway: Gateway, tell: Tell, known: Callable[[str], bool]) -> None:
        """`known`: conversations that need not be read."""
        self._gateway = gateway
        self._tell = tell
        self._known = known
        self._next: dict[str, int] = {}  # by channel, the number of the first group that is not listed yet
        self._silent: dict[str, None] = {}  # those that had no answer yet
        self._lock = asyncio.Lock()
        self._looks = 0
        self.done = False  # all that was there at the start is known

    async def look(self, again: Sequence[str] = ()) -> None:
        """Returns once everything is known that was in the pool when this was called, or the pool was too slow.
        Of those that are known, only `again` are read once more."""
        before = self._looks
        try:
            async with asyncio.timeout(PATIENCE_S), self._lock:
                if self._looks == before:  # otherwise another look began after this was called
                    self._looks += 1
                    await self._read()
                for held in again:
                    await self._one(held)
        except TimeoutError:
            log.warning("the pool's conversations could not be read within %g s", PATIENCE_S)
        except HeadraceError as error:
            log.warning("the pool's conversations could not be read: %s", error)

    async def complete(self) -> bool:
        """Whether all that was there at the start is known; if it was not, the pool is asked."""
        if not self.done:
            await self.look()
        return self.done

    async def _read(self) -> None:
        gateway = self._gateway
        await gateway.recorder.flushed()
        tenants = {tenant.channel(None) for tenant in gateway.access.tenants}
        for held in list(self._silent):
            if self._known(held):
                del self._silent[held]
            else:
                await self._one(held)
        for channel in {gateway.models.default.channel, *tenants}:
            more = True
            while more:
                page = await gateway.pool.aio.list_groups(channel, cursor=self._next.get(channel, 0), limit=PAGE)
                more = page["next"] is not None
                for row in page["items"]:
                    held = row["prompt_uid"]
                    if is_live(held) and not row["complete"] and not self._known(held):
                        await self._one(held)
                    self._next[channel] = row["seq"] + 1
        self.done = True

    async def _one(self, held: str) -> None:
        self._silent.pop(held, None)
        found: list[Trajectory] = []
        for policy in self._gateway.models:
            try:
                found.append(await self._gateway.pool.aio.trajectory(policy.uid_of(held)))
            except NotFound:
                continue
        if not any(map(len, found)):
            if found:
                self._silent[held] = None
            return
        if not found[0].complete:
            self._tell(held, found)
