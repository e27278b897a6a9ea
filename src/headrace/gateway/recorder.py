"""Hands steps over: to an embedded pool at once, to one that is elsewhere or full through the outbox.

Handing over never waits for a pool that does not answer. What could not be kept is counted and said, never hidden; the
agents are served all the same. Only a journal of our own that cannot be written is waited for, and then the call is
refused: nothing else would keep what was answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.packing import pack
from headrace.data.step import Step
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.outbox import RETRY_INTERVAL_S, Outbox, OutboxEntry
from headrace.gateway.sessions import Session
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Conflict, DiskFull, JournalError, PoolFull
from headrace.pool.operation import Receipt
from headrace.pool.remote import RemotePool
from headrace.tokens import Node

log = logging.getLogger("headrace.gateway")

#: Seconds that a call waits for room on a full disk before it is refused.
DISK_FULL_WAIT_S = 10.0


class Recorder:
    """Where a gateway's steps go. `ack="pool"` makes a hand-over wait for a remote pool's own acknowledgement."""

    def __init__(
        self,
        pool: DataPool | RemotePool,
        counters: GatewayCounters,
        *,
        outbox_mb: float,
        ack: str,
        file: Path | None = None,
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._direct = isinstance(pool, DataPool)
        self._ack_pool = ack == "pool"
        self.outbox = Outbox(pool, most=int(outbox_mb * 1e6), file=file, lost=self._lost)
        self.broken: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why a gateway is degraded: a pool that is out of reach, or steps that are being lost."""
        return self.outbox.trouble or self.broken

    async def start(self) -> None:
        """Queues what an earlier process left in the outbox's file."""
        await self.outbox.start()

    async def close(self, drain_s: float | None) -> int:
        """Sends what waits, for at most `drain_s` seconds; how many steps are left."""
        return await self.outbox.close(drain_s)

    @property
    def waits_for_pool(self) -> bool:
        """Whether handing over waits until the pool has said whether it takes the steps."""
        return self._direct or self._ack_pool

    async def hand_over(
        self, session: Session, steps: Sequence[Step], nodes: Sequence[Node | None], *, named: bool = False
    ) -> None:
        """Returns once the steps are in the pool or in the outbox, or are counted as lost; with `ack="pool"`, once a
        remote pool has them. `nodes` learn the indices of their steps. Raises `JournalError` where an embedded pool
        cannot write its journal, and for a `named` call `Conflict` where the pool has the steps of another try."""
        self._counters.add("steps", session.channel, by=len(steps))
        if self._direct and not self.outbox.waits(session.channel):
            try:
                receipt = await self._submitted(steps, session.channel)
            except PoolFull:
                pass  # a channel that makes producers wait: the outbox does that for the agent
            except JournalError as error:
                self._lost(session.channel, len(steps), error.code, error)
                raise
            except HeadraceError as error:
                if named and isinstance(error, Conflict):
                    raise
                self.broken = f"steps cannot be kept: {error}"
                self._lost(session.channel, len(steps), error.code, error)
                return
            else:
                self.broken = None
                self._taken(session, nodes, receipt)
                return
        try:
            block = pack(steps)
        except InvalidInput as error:
            self._lost(session.channel, len(steps), error.code, error)
            return
        session.busy += 1  # until the pool has it, nobody else can tell what was sampled here

        def done(receipt: Receipt | None) -> None:
            session.busy -= 1
            if receipt is not None:
                # A pool that was set back (its machine lost what was not on disk) numbers steps anew.
                session.is_old |= any(0 <= index < session.steps for index in receipt.indices)
                self._taken(session, nodes, receipt)

        waits = self._ack_pool and not self._direct
        entry = OutboxEntry(session.channel, block, done, named=named and waits)
        if await self.outbox.put(entry) and waits:
            await entry.sent.wait()
            if entry.conflict is not None:
                raise entry.conflict

    async def _submitted(self, steps: Sequence[Step], channel: str) -> Receipt:
        """Submits to the embedded pool. A full disk may have room again: it is tried for `DISK_FULL_WAIT_S`."""
        until = time.monotonic() + DISK_FULL_WAIT_S
        while True:
            try:
                return await self._pool.aio.submit_steps(steps, channel, timeout=0)
            except JournalError as error:
                self.broken = f"steps cannot be kept: {error}"
                if not isinstance(error, DiskFull) or time.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def flushed(self, *uids: str) -> None:
        """Returns once what was handed over so far of these trajectories, or of all, is in the pool;
        `PoolUnreachable` where that takes too long."""
        if self.outbox.waiting:
            await self.outbox.flushed(*uids)

    def _taken(self, session: Session, nodes: Sequence[Node | None], receipt: Receipt) -> None:
        if receipt.late:
            self._counters.add("late", session.channel, by=receipt.late)
            session.is_old = True  # another process has ended it: the next call is to hear so
        for node, index in zip(nodes, receipt.indices, strict=True):
            if index >= 0:
                session.steps = max(session.steps, index + 1)
                if node is not None:
                    node.step = index

    def _lost(self, channel: str, steps: int, reason: str, error: Any) -> None:
        self._counters.add("lost", channel, reason, by=steps)
        log.error("%d steps of channel %r could not be kept: %s", steps, channel, error)
