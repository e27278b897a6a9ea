"""Steps on their way to a pool that is elsewhere: a bounded queue, sent in order, many at once.

With a file, what was put is on disk before `put` returns, and a process that starts on the same file sends it again;
the pool knows steps by their call id, so what had arrived counts once. The file is cut to nothing whenever everything
in it has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.data.block import Block
from headrace.data.errors import HeadraceError
from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalError, PoolClosed, PoolFull, PoolUnreachable, Unauthorized
from headrace.pool.plan import Receipt
from headrace.pool.remote import RemotePool
from headrace.pool.wire import decode_call, encode_call

log = logging.getLogger("headrace.gateway")

#: Steps and bytes that go in one call.
MOST_STEPS = 256
MOST_BYTES = 16_000_000
#: Seconds that a caller waits for the queue to empty before it is told that the pool is out of reach.
FLUSH_S = 10.0
#: Seconds between tries at a pool that has no room, or is gone.
RETRY_S = 0.2
#: What passes: the pool is full, away, locked up, or its disk is full.
PASSING = (PoolFull, PoolUnreachable, PoolClosed, JournalError, Unauthorized)

Lost = Callable[[str, int, str, Any], None]


class Entry:
    """Steps of one call. `done` is told what became of them: a receipt, or None where they were lost."""

    def __init__(self, channel: str, block: Block, done: Callable[[Receipt | None], None]) -> None:
        self.channel = channel
        self.block = block
        self.count = len(self.block.heads)
        self.size = len(self.block.ids) + len(self.block.log_probs) + sum(len(head.extra) for head in self.block.heads)
        self.done = done
        self.sent = asyncio.Event()

    def ended(self, receipt: Receipt | None) -> None:
        self.done(receipt)
        self.sent.set()


class Outbox:
    """The queue and the task that empties it."""

    def __init__(self, pool: DataPool | RemotePool, *, most: int, file: Path | None, lost: Lost) -> None:
        self._pool = pool
        self._most = most
        self._spool = Spool(file) if file is not None else None
        self._lost = lost
        self._queue: deque[Entry] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self.trouble: str | None = None

    @property
    def waiting(self) -> int:
        """Entries that are not in the pool yet."""
        return len(self._queue)

    @property
    def bytes(self) -> int:
        return self._bytes

    async def start(self) -> None:
        if self._spool is not None:
            for channel, block in self._spool.read():
                self._add(Entry(channel, block, lambda receipt: None))
        self._sender = asyncio.ensure_future(self._send())

    async def put(self, entry: Entry) -> bool:
        """Queues an entry; False where there is no room, and it is lost."""
        if self._bytes + entry.size > self._most:
            self.trouble = "the outbox is full: steps are being lost"
            self._lost(entry.channel, entry.count, "outbox_full", "the outbox is full")
            entry.ended(None)
            return False
        if self._spool is not None:
            try:
                await self._spool.append(entry.channel, entry.block)
            except OSError as error:
                self.trouble = f"the outbox cannot be written: {error}"
                self._lost(entry.channel, entry.count, "outbox_file", error)
                entry.ended(None)
                return False
        self._add(entry)
        return True

    def _add(self, entry: Entry) -> None:
        self._queue.append(entry)
        self._bytes += entry.size
        self._filled.set()

    async def flushed(self) -> None:
        """Returns once what waits now is in the pool."""
        last = self._queue[-1] if self._queue else None
        if last is None:
            return
        try:
            await asyncio.wait_for(last.sent.wait(), FLUSH_S)
        except TimeoutError:
            raise PoolUnreachable(f"{self.waiting} calls wait for the pool: {self.trouble or 'it is slow'}") from None

    async def close(self, patience: float | None) -> int:
        """Sends what waits, for so long; how many steps are left."""
        if self._queue:
            try:
                await asyncio.wait_for(self._queue[-1].sent.wait(), patience)
            except TimeoutError:
                pass
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        if self._spool is not None:
            self._spool.close()
        return sum(entry.count for entry in self._queue)

    async def _send(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                batch = list(self._batch())
                try:
                    receipts = await self._submit(batch)
                except PASSING as error:
                    if self.trouble is None:
                        log.warning("steps wait for the pool: %s", error)
                    self.trouble = f"the pool is out of reach: {error}"
                    await asyncio.sleep(RETRY_S)
                    continue
                self.trouble = None
                for entry, receipt in zip(batch, receipts, strict=True):
                    self._queue.popleft()
                    self._bytes -= entry.size
                    entry.ended(receipt)
            if self._spool is not None:
                await self._spool.clear_unless(lambda: bool(self._queue))

    def _batch(self) -> Iterator[Entry]:
        """The entries that go next, in one call: of one channel."""
        steps = size = 0
        first = self._queue[0]
        for entry in self._queue:
            steps, size = steps + entry.count, size + entry.size
            if entry is not first and (entry.channel != first.channel or steps > MOST_STEPS or size > MOST_BYTES):
                return
            yield entry

    async def _submit(self, batch: list[Entry]) -> list[Receipt | None]:
        try:
            block = batch[0].block if len(batch) == 1 else joined([entry.block for entry in batch])
            receipt = await self._pool._do_async("submit", {"channel": batch[0].channel, "timeout": 0}, block)
        except PASSING:
            raise
        except HeadraceError as error:
            if len(batch) > 1:  # one of them is at fault; the others must not suffer
                return [(await self._submit([entry]))[0] for entry in batch]
            self._lost(batch[0].channel, batch[0].count, error.code, error)
            return [None]
        return _shares(receipt, batch)


def joined(blocks: Sequence[Block]) -> Block:
    """Several submits as one."""
    blobs = {digest: blob for block in blocks for digest, blob in block.blobs.items()}
    return Block.of([record for block in blocks for record in block.records()], blobs)


def _shares(receipt: Receipt, batch: list[Entry]) -> list[Receipt | None]:
    """What became of each entry, out of the receipt for all of them."""
    found: list[Receipt | None] = []
    at = 0
    for entry in batch:
        indices = receipt.indices[at : at + entry.count]
        late = sum(index < 0 for index in indices)
        found.append(Receipt(len(indices) - late, 0, late, indices))
        at += entry.count
    return found


class Spool:
    """The outbox's file: calls as they will be sent, each behind its length."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._lock = asyncio.Lock()

    def read(self) -> Iterator[tuple[str, Block]]:
        """What an earlier process left. A torn tail was never acknowledged; it is cut off, so that what is written
        next stands behind a whole record."""
        data = self._path.read_bytes()
        at = 0
        while at + 8 <= len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            frame = data[at + 8 : at + 8 + length]
            try:
                _, args, block = decode_call(frame)
            except HeadraceError as error:
                log.warning("outbox %s: %d bytes at its end are torn: %s", self._path, len(data) - at, error)
                break
            assert block is not None
            yield args["channel"], block
            at += 8 + length
        if at < len(data):
            os.ftruncate(self._fd, at)
            self._size = at

    async def append(self, channel: str, block: Block) -> None:
        """Writes a call down; returns once it is on disk."""
        frame = encode_call("submit", {"channel": channel, "timeout": None}, block)
        record = len(frame).to_bytes(8, "little") + frame
        async with self._lock:
            await asyncio.get_running_loop().run_in_executor(None, self._write, record)

    def _write(self, record: bytes) -> None:
        view = memoryview(record)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)  # half a record would hide every later one
            raise
        self._size += len(record)

    async def clear_unless(self, busy: Callable[[], bool]) -> None:
        """Cuts the file to nothing, unless something came in meanwhile."""
        async with self._lock:
            if self._size and not busy():
                os.ftruncate(self._fd, 0)
                self._size = 0

    def close(self) -> None:
        os.close(self._fd)
