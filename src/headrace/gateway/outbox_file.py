"""The outbox on disk: the calls that have not arrived in the pool, for the process that starts after this one.

A frame of the file is a mark, its length, a checksum and the call. Damage costs the frames that it touches and no
other: the next one is found by its mark. What could not be read is kept in a file beside it. Every format keeps the
mark, and its calls say their format version: what a later release wrote is refused, not cut off. The file is cut to
nothing whenever everything in it has arrived, and written anew with what waits where most of it has.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import crc32c

from headrace.data.block import Block
from headrace.data.errors import ForeignFrame, HeadraceError
from headrace.files import sync_folder
from headrace.pool.errors import JournalError, JournalLocked
from headrace.pool.wire import decode_call, encode_call

log = logging.getLogger("headrace.gateway")

FRAME_MARK = b"\x89hrO\r\n\x1a\n"
_HEAD = struct.Struct("<8sQI")
#: A file with so many bytes more than twice those of the calls that wait in it is written anew.
SLACK_BYTES = 16_000_000


class OutboxFile:
    """The outbox's file, of one process: it is locked while it is open. `JournalLocked` where it is in use."""

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

    def read(self) -> Iterator[tuple[int, str, Block]]:
        """The calls that an earlier process left, each with its number: they wait now. A torn end was never
        acknowledged; it is cut off, so that what is written next stands behind a whole frame. Damage before it goes
        into a file of its own, and is counted.
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
            (channel, block), end = found
            at = end
            yield self._note(channel, block, end - start), channel, block
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
                    with self._writing:
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
