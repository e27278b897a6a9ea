"""Steps on their way to a pool that is elsewhere or full: bounded queues, one a channel, each sent in order in batches.

A channel that takes nothing holds up its own steps and nobody else's. With a file, what was put is on disk before `put`
returns, and a process that starts on the same file sends it again; the pool knows steps by their call id, so what had
arrived counts once. The file is cut to nothing whenever everything in it has arrived, and written anew with what waits
where most of it has.

A frame of the file is a mark, its length, a checksum and the call. Damage costs the frames that it touches and no
other: the next one is found by its mark. What could not be read is kept in a file beside it. Every format keeps the
mark, and its calls say their format version: what a later release wrote is refused, not cut off.

One file of frames, and not a file a step as environments have it (`headrace.envs.sender`): a step has a few kilobytes,
and hundreds come a second.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import crc32c

from headrace.data.block import Block
from headrace.data.errors import ForeignFrame, HeadraceError
from headrace.files import sync_folder
from headrace.net.supervised import Supervised
from headrace.pool.embedded import DataPool
from headrace.pool.errors import (
    Conflict,
    InternalError,
    JournalError,
    JournalLocked,
    PoolClosed,
    PoolFull,
    PoolUnreachable,
    Unauthorized,
)
from headrace.pool.operation import Receipt
from headrace.pool.operations.submit import SubmitBlock
from headrace.pool.remote import RemotePool
from headrace.pool.wire import decode_call, encode_call

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

FRAME_MARK = b"\x89hrO\r\n\x1a\n"
_HEAD = struct.Struct("<8sQI")
#: A file with so many bytes more than twice those of the calls that wait in it is written anew.
SLACK_BYTES = 16_000_000


class OutboxFile:
    """The outbox on disk, of one process: the file is locked while it is open. `JournalLocked` where it is in use."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.aside = path.with_name(f"{path.name}.damaged")
        self.damaged = 0  # bytes that could not be read
        self._fd = _open_locked(path)
        self._size = os.fstat(self._fd).st_size
        self._lock = asyncio.Lock()
        self._writing = threading.Lock()  # a write goes on though who awaits it was cancelled
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}  # in the order in which they stand in the file
        self._waiting_bytes = 0
        self._rewrite_at = 0  # bytes of the file from which on it is tried again, once that failed

    def read(self) -> Iterator[tuple[str, Block]]:
        """The calls that an earlier process left. A torn end was never acknowledged; it is cut off, so that what is
        written next stands behind a whole frame. Damage before it goes into a file of its own, and is counted.
        `JournalError` where another release wrote the file: nothing is changed then."""
        data = self._path.read_bytes()
        at = end = 0  # where to look, and behind the last whole frame
        while (start := data.find(FRAME_MARK, at)) >= 0:
            try:
                found = _frame(data, start)
            except ForeignFrame as error:
                raise JournalError(
                    f"outbox {self._path} is of another release: at byte {start}, {error}. Nothing was changed; start "
                    "that release on it once, which sends what it holds, or move the file away"
                ) from error
            if found is None:
                at = start + 1
                continue
            if start > end:
                self._set_aside(data[end:start])
            frame, at = found
            end = at
            yield frame
        if end < len(data):
            log.warning("outbox %s: %d bytes at its end are torn", self._path, len(data) - end)
            torn = FRAME_MARK.startswith(data[end : end + len(FRAME_MARK)])
            if not torn or data.find(FRAME_MARK, end + 1) >= 0:  # no beginning, or more than one: damage
                self._set_aside(data[end:])
            os.ftruncate(self._fd, end)
            self._size = end

    def _set_aside(self, piece: bytes) -> None:
        log.error("outbox %s: %d bytes are damaged; they are kept in %s", self._path, len(piece), self.aside)
        self.damaged += len(piece)
        with self.aside.open("ab") as file:
            file.write(piece)

    async def append(self, channel: str, block: Block) -> int:
        """Writes a call down; returns its number once it is on disk."""
        record = _record(channel, block)
        async with self._lock:
            await asyncio.get_running_loop().run_in_executor(None, self._write, record)
            return self._note(channel, block, len(record))

    def keep(self, channel: str, block: Block) -> int:
        """Notes a call that was read, and waits; its number. The calls of a file are noted in their order."""
        return self._note(channel, block, len(_record(channel, block)))

    def _note(self, channel: str, block: Block, size: int) -> int:
        number = next(self._numbers)
        self._waiting[number] = _Waiting(channel, block, size)
        self._waiting_bytes += size
        return number

    async def let_go(self, number: int) -> None:
        """A call waits no longer: the file may be cut, or written anew without it."""
        self._waiting_bytes -= self._waiting.pop(number).size
        if self._waiting and not self._is_too_large:
            return
        async with self._lock:
            try:
                if not self._waiting and self._size:
                    os.ftruncate(self._fd, 0)
                    self._size = self._rewrite_at = 0
                elif self._is_too_large:
                    waiting = list(self._waiting.values())
                    await asyncio.get_running_loop().run_in_executor(None, self._rewrite, waiting)
            except OSError as error:
                self._rewrite_at = 2 * self._size
                log.warning("outbox %s: it stays as long as it is: %s", self._path, error)

    @property
    def _is_too_large(self) -> bool:
        return self._size > max(2 * self._waiting_bytes + SLACK_BYTES, self._rewrite_at)

    def _write(self, record: bytes) -> None:
        with self._writing:
            try:
                _write_all(self._fd, record)
                os.fdatasync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._size)  # nobody was told that it is there
                raise
            self._size += len(record)

    def _rewrite(self, waiting: Sequence[_Waiting]) -> None:
        """Puts a file with these calls alone in this one's place."""
        draft = self._path.with_name(f"{self._path.name}.part")
        with self._writing:
            draft.unlink(missing_ok=True)
            fd = _open_locked(draft)
            try:
                for call in waiting:
                    _write_all(fd, _record(call.channel, call.block))
                os.fsync(fd)
                os.replace(draft, self._path)
            except BaseException:
                os.close(fd)
                draft.unlink(missing_ok=True)
                raise
            os.close(self._fd)
            self._fd, self._size, self._rewrite_at = fd, os.fstat(fd).st_size, 0
            sync_folder(self._path.parent)

    def close(self) -> None:
        """Closes the file, which unlocks it."""
        os.close(self._fd)


class _Waiting(NamedTuple):
    """A call that stands in the file with so many bytes, and has not arrived."""

    channel: str
    block: Block
    size: int


def _open_locked(path: Path) -> int:
    """A descriptor of the file at a path, for this process alone; `JournalLocked` where another has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise JournalLocked(
                f"outbox {path} is in use by another gateway; give each a --journal of its own"
            ) from None
        os.close(fd)  # another was put into its place as it was opened


def _record(channel: str, block: Block) -> bytes:
    frame = encode_call("submit", {"channel": channel, "timeout": None}, block)
    return _HEAD.pack(FRAME_MARK, len(frame), crc32c.crc32c(frame)) + frame


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _frame(data: bytes, at: int) -> tuple[tuple[str, Block], int] | None:
    """The call in the frame that begins here, and where it ends; None where it is not whole. `ForeignFrame` where it is
    whole and of another release."""
    if at + _HEAD.size > len(data):
        return None
    _, length, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    frame = data[at + _HEAD.size : end]
    if len(frame) != length or crc32c.crc32c(frame) != checksum:
        return None
    try:
        _, args, block = decode_call(frame)
    except ForeignFrame:
        raise
    except HeadraceError:
        return None
    channel = args.get("channel")
    return ((channel, block), end) if block is not None and isinstance(channel, str) else None


class OutboxEntry:
    """Steps of one call. `done` is called with the pool's receipt, or with None where they were not taken; then `sent`
    is set. Those of a `named` call that the pool has of another try are not lost: `conflict` says so."""

    def __init__(
        self, channel: str, block: Block, done: Callable[[Receipt | None], None], *, named: bool = False
    ) -> None:
        self.channel = channel
        self.block = block
        self.count = len(self.block.heads)
        self.size = len(self.block.ids) + len(self.block.log_probs) + sum(len(head.extra) for head in self.block.heads)
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
            for channel, block in self._file.read():
                entry = OutboxEntry(channel, block, lambda receipt: None)
                entry.number = self._file.keep(channel, block)
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
