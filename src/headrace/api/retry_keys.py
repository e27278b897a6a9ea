"""Keys for groups whose client sends none: the same group from the same environment, until its answer has arrived.

A client that saw no answer sends the group again, and the pool knows it by its key, also after a restart. Once the
answer has arrived the pool is told to forget the key: an equal group is then another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence

from headrace.data.errors import HeadraceError
from headrace.data.scored import ScoredGroup
from headrace.pool.calls import AsyncPool

log = logging.getLogger("headrace.api")

#: An environment's id, and a key that it uses.
Key = tuple[int | None, str]
#: What equal groups of an environment have in common, as it is sorted: whether it has an id, its id, and the digest.
_Name = tuple[bool, int, str]

#: Groups of which it is remembered that their next key is not their first: more than that were never sent again.
TURNS_KEPT = 4096
#: Seconds after which keys of answers that arrived are forgotten, all of them in one call to the pool.
FORGET_AFTER_S = 0.05


class RetryKeys:
    """The keys that groups are posted under now, and those whose answer arrived since the pool was last told."""

    def __init__(self, pool: AsyncPool) -> None:
        self._pool = pool
        self._busy: dict[Key, asyncio.Event] = {}  # until their answer has arrived, or has not
        self._arrived: dict[Key, None] = {}  # until the pool has forgotten them
        # The turn of the key that was taken last, by its environment and digest, where that is not the first: until the
        # pool has forgotten it. Earlier ones are forgotten before, and must not be taken in its place.
        self._turns: OrderedDict[Key, int] = OrderedDict()
        self._forgetting: asyncio.Task[None] | None = None

    async def take(self, groups: Sequence[ScoredGroup]) -> list[Key]:
        """A key for each group. It is that of an equal one whose answer did not arrive, where there is one; while that
        is not known yet, it waits. Keys are taken in their own order, whatever that of the groups: two posts would
        else wait for each other."""
        seen: Counter[_Name] = Counter()  # equal groups in one post are sent on purpose
        wanted: list[tuple[_Name, int]] = []
        for group in groups:
            name = (group.env_id is not None, group.env_id or 0, group.digest)
            wanted.append((name, seen[name]))
            seen[name] += 1
        found: dict[int, Key] = {}
        try:
            for at in sorted(range(len(groups)), key=wanted.__getitem__):
                found[at] = await self._free(groups[at].env_id, groups[at].digest, wanted[at][1])
        except BaseException:
            self.settle(list(found.values()), False)
            raise
        return [found[at] for at in range(len(groups))]

    async def _free(self, env: int | None, digest: str, copy: int) -> Key:
        """A key that no post is under way with; while an equal group's answer is not settled, waits for that."""
        group = (env, f"{digest}-{copy}")
        while True:
            turn = self._turns.get(group, 0)
            key = _key(group, turn)
            while key in self._arrived:
                turn += 1
                key = _key(group, turn)
            if key not in self._busy:
                break
            await self._busy[key].wait()
        self._busy[key] = asyncio.Event()
        if turn:
            self._turns[group] = turn
            if len(self._turns) > TURNS_KEPT:
                self._turns.popitem(last=False)
        return key

    def settle(self, keys: Sequence[Key], arrived: bool) -> None:
        """The answer to these groups arrived, or did not."""
        if arrived:
            self._arrived |= dict.fromkeys(keys)
            if self._forgetting is None:
                self._forgetting = asyncio.create_task(self._forget_soon())
        for key in keys:
            self._busy.pop(key).set()

    async def close(self) -> None:
        """Tells the pool, once, of all answers that arrived."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            await asyncio.gather(self._forgetting, return_exceptions=True)
        await self._forget()

    async def _forget_soon(self) -> None:
        again = False
        try:
            await asyncio.sleep(FORGET_AFTER_S)
            again = await self._forget() and bool(self._arrived)  # some may have come meanwhile
        finally:
            self._forgetting = asyncio.create_task(self._forget_soon()) if again else None

    async def _forget(self) -> bool:
        """Whether the pool has heard of all that had arrived."""
        keys = list(self._arrived)
        try:
            if keys:
                await self._pool.desk_forget(keys)
        except HeadraceError as error:
            log.warning("the pool could not be told yet that %d answers arrived: %s", len(keys), error)
            return False
        for key in keys:
            del self._arrived[key]
            env, named = key
            name, _, turn = named.rpartition("-")
            if self._turns.get((env, name)) == int(turn):
                del self._turns[env, name]
        return True


def _key(group: Key, turn: int) -> Key:
    env, name = group
    return env, f"{name}-{turn}"
