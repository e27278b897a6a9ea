"""Steps on their way to a pool that is elsewhere or full: bounded queues, one a channel, each sent in order in batches.

A channel that takes nothing holds up its own steps and nobody else's. With a file, what was put is on disk before `put`
returns, and a process that starts on the same file sends it again; the pool knows steps by their call id, so what had
arrived counts once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.data.block import Block
from headrace.data.errors import ForeignFrame, HeadraceError
from headrace.gateway.outbox_file import OutboxFile
from headrace.net.supervised import Supervised
from headrace.pool.embedded import DataPool
from headrace.pool.errors import (
    Conflict,
    InternalError,
    JournalError,
    PoolClosed,
    PoolFull,
    PoolUnreachable,
    Unauthorized,
)
from headrace.pool.operation import Receipt
from headrace.pool.operations.submit import SubmitBlock
from headrace.pool.remote import RemotePool

log = logging.getLogger("headrace.gateway")

#: Steps and bytes that go in one call: enough that the calls' own cost does not count, little enough to arrive soon.
MAX_BATCH_STEPS = 256
MAX_BATCH_BYTES = 16_000_000
#: Seconds that a caller waits for steps to arrive before it is told that the pool is out of reach.
FLUSH_TIMEOUT_S = 10.0
#: Seconds between tries at a pool that has no room, or is gone.
RETRY_INTERVAL_S = 0.2
#: Tries at a call at which the pool itself fails, before it is taken for the fault of what was sent.
MAX_TRIES = 5
#: What passes: the pool is full, away, locked up, its disk is full, or it is yet to be upgraded as this process was.
TRANSIENT_ERRORS = (PoolFull, PoolUnreachable, PoolClosed, JournalError, Unauthorized, ForeignFrame)

#: Told of what could not be kept: the channel, how many steps, the reason, and the error.
Lost = Callable[[str, int, str, Any], None]
#: Sends entries of one channel in one call; what became of each.
Submit = Callable[["list[OutboxEntry]"], Awaitable["list[Receipt | None]"]]
#: Told that an entry is in the pool, or lost.
Ended = Callable[["OutboxEntry", "Receipt | None"], Awaitable[None]]


class OutboxEntry:
    """Steps of one call. `done` is called with the pool's receipt, or with None where they were not taken; then `sent`
    is set. Those of a `named` call that the pool has of another try are not lost: `conflict` says so."""

    def __init__(
        self, channel: str, block: Block, done: Callable[[Receipt | None], None], *, named: bool = False
    ) -> None:
        self.channel = channel
        self.block = block
        self.count = len(self.block.heads)
        self.size = sum(map(len, block.body())) + sum(len(head.extra) for head in block.heads)
        self.uids = {head.trajectory_uid for head in self.block.heads}
        self.done = done
        self.named = named
        self.conflict: Conflict | None = None
        self.number: int | None = None  # in the outbox's file
        self.sent = asyncio.Event()

    def ended(self, receipt: Receipt | None) -> None:
        """Tells whoever waits for it what became of it."""
        self.done(receipt)
        self.sent.set()


class Outbox:
    """The queues of all channels, and how much they may hold together."""

    def __init__(self, pool: DataPool | RemotePool, *, most: int, file: Path | None, lost: Lost) -> None:
        self._pool = pool
        self._most = most
        self._file = OutboxFile(file) if file is not None else None
        self._lost = lost
        self._queues: dict[str, ChannelQueue] = {}
        self._last: dict[str, OutboxEntry] = {}  # by trajectory, the entry that was put last and is not in the pool yet
        self._bytes = 0
        self._trouble: str | None = None

    @property
    def trouble(self) -> str | None:
        """Why steps wait or are lost; None while all is well."""
        return next((queue.trouble for queue in self._queues.values() if queue.trouble), self._trouble)

    @property
    def waiting(self) -> int:
        """Entries that are not in the pool yet."""
        return sum(len(queue.entries) for queue in self._queues.values())

    @property
    def bytes(self) -> int:
        """Bytes of the entries that are not in the pool yet."""
        return self._bytes

    async def start(self) -> None:
        """Queues what an earlier process left in the file."""
        if self._file is not None:
            for number, channel, block in self._file.read():
                entry = OutboxEntry(channel, block, lambda receipt: None)
                entry.number = number
                self._add(entry)
            if self._file.damaged:
                self._trouble = f"{self._file.damaged} bytes of the outbox were damaged: see {self._file.aside}"

    async def put(self, entry: OutboxEntry) -> bool:
        """Queues an entry; False where there is no room, and it is lost."""
        if self._bytes + entry.size > self._most:
            self._trouble = "the outbox is full: steps are being lost"
            self._lost(entry.channel, entry.count, "outbox_full", "the outbox is full")
            entry.ended(None)
            return False
        if self._file is not None:
            try:
                entry.number = await self._file.append(entry.channel, entry.block)
            except OSError as error:
                self._trouble = f"the outbox cannot be written: {error}"
                self._lost(entry.channel, entry.count, "outbox_file", error)
                entry.ended(None)
                return False
        self._trouble = None
        self._add(entry)
        return True

    def waits(self, channel: str) -> bool:
        """Whether something of a channel is not in the pool yet: what comes next must stand behind it."""
        return channel in self._queues and bool(self._queues[channel].entries)

    def _add(self, entry: OutboxEntry) -> None:
        queue = self._queues.get(entry.channel)
        if queue is None:
            queue = self._queues[entry.channel] = ChannelQueue(entry.channel, self._submit, self._ended, self._lost)
        self._bytes += entry.size
        for uid in entry.uids:
            self._last[uid] = entry
        queue.add(entry)

    async def _ended(self, entry: OutboxEntry, receipt: Receipt | None) -> None:
        self._bytes -= entry.size
        for uid in entry.uids:
            if self._last.get(uid) is entry:
                del self._last[uid]
        entry.ended(receipt)
        if self._file is not None and entry.number is not None:
            await self._file.let_go(entry.number)

    async def flushed(self, *uids: str) -> None:
        """Returns once what waits now of these trajectories is in the pool; of all of them, where none is named."""
        waiting = {self._last[uid] for uid in (uids or self._last) if uid in self._last}
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                for entry in waiting:
                    await entry.sent.wait()
        except TimeoutError:
            raise PoolUnreachable(f"{self.waiting} calls wait for the pool: {self.trouble or 'it is slow'}") from None

    async def close(self, drain_s: float | None) -> int:
        """Sends what waits, for at most `drain_s` seconds; how many steps are left."""
        try:
            async with asyncio.timeout(drain_s):
                for entry in [queue.entries[-1] for queue in self._queues.values() if queue.entries]:
                    await entry.sent.wait()
        except TimeoutError:
            pass
        for queue in self._queues.values():
            await queue.close()
        if self._file is not None:
            self._file.close()
        return sum(entry.count for queue in self._queues.values() for entry in queue.entries)

    async def _submit(self, batch: list[OutboxEntry]) -> list[Receipt | None]:
        try:
            block = batch[0].block if len(batch) == 1 else joined([entry.block for entry in batch])
            receipt = await self._pool.execute_async(SubmitBlock(block, batch[0].channel, timeout=0))
        except (*TRANSIENT_ERRORS, InternalError):
            raise
        except HeadraceError as error:
            if len(batch) > 1:  # one of them is at fault; the others must not suffer
                return [(await self._submit([entry]))[0] for entry in batch]
            if batch[0].named and isinstance(error, Conflict):
                batch[0].conflict = error
            else:
                self._lost(batch[0].channel, batch[0].count, error.code, error)
            return [None]
        return _shares(receipt, batch)


class ChannelQueue:
    """One channel's queue, and the supervised task that sends it."""

    def __init__(self, channel: str, submit: Submit, ended: Ended, lost: Lost) -> None:
        self.entries: deque[OutboxEntry] = deque()
        self._channel = channel
        self._submit = submit
        self._ended = ended
        self._lost = lost
        self._filled = asyncio.Event()
        self._trouble: str | None = None
        self._failures = 0  # of the pool's own, in a row
        self._narrow = False  # one entry a call, to find the one at which the pool fails
        self._sender = Supervised(f"the sender of channel {channel!r}", self._send)
        self._sender.start()

    @property
    def trouble(self) -> str | None:
        """Why nothing is being sent; None where all is well."""
        return self._sender.trouble or self._trouble

    def add(self, entry: OutboxEntry) -> None:
        """Queues an entry behind the others."""
        self.entries.append(entry)
        self._filled.set()

    async def close(self) -> None:
        """Stops sending; what is left stays in `entries`."""
        await self._sender.stop()

    async def _send(self) -> None:
        while True:
            if not self.entries:
                self._filled.clear()
                await self._filled.wait()
            batch = list(self._batch())
            try:
                receipts = await self._submit(batch)
            except (*TRANSIENT_ERRORS, InternalError) as error:
                self._say(error)
                if not isinstance(error, InternalError) or not self._is_at_fault(batch):
                    await asyncio.sleep(RETRY_INTERVAL_S)
                    continue
                self._lost(self._channel, batch[0].count, error.code, error)
                receipts = [None]
            self._trouble, self._failures, self._narrow = None, 0, False
            for entry, receipt in zip(batch, receipts, strict=True):
                self.entries.popleft()
                await self._ended(entry, receipt)

    def _say(self, error: HeadraceError) -> None:
        if self._trouble is None:
            log.warning("steps of channel %r wait for the pool: %s", self._channel, error)
        self._trouble = f"the pool is out of reach: {error}"

    def _is_at_fault(self, batch: list[OutboxEntry]) -> bool:
        """Whether the pool fails at this one entry again and again. Many are sent one by one first."""
        self._failures += 1
        if self._failures < MAX_TRIES:
            return False
        self._failures, alone = 0, self._narrow or len(batch) == 1
        self._narrow = True
        return alone

    def _batch(self) -> Iterator[OutboxEntry]:
        """The entries that go next, in one call."""
        steps = size = 0
        first = self.entries[0]
        for entry in self.entries:
            steps, size = steps + entry.count, size + entry.size
            if entry is not first and (self._narrow or steps > MAX_BATCH_STEPS or size > MAX_BATCH_BYTES):
                return
            yield entry


def joined(blocks: Sequence[Block]) -> Block:
    """Several submits as one."""
    blobs = {digest: blob for block in blocks for digest, blob in block.blobs.items()}
    return Block.of([record for block in blocks for record in block.records()], blobs)


def _shares(receipt: Receipt, batch: list[OutboxEntry]) -> list[Receipt | None]:
    """What became of each entry, out of the receipt for all of them."""
    found: list[Receipt | None] = []
    at = 0
    for entry in batch:
        indices = receipt.indices[at : at + entry.count]
        late = sum(index < 0 for index in indices)
        found.append(Receipt(len(indices) - late, 0, late, indices))
        at += entry.count
    return found
