"""The outbox's file: calls as they will be sent, each in a frame of its own.

A frame is a mark, its length, a checksum and the call. Damage costs the frames that it touches and no other: the next
one is found by its mark. What could not be read is kept beside the file.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c

from headrace.data.block import Block
from headrace.data.errors import HeadraceError
from headrace.pool.errors import JournalLocked
from headrace.pool.wire import decode_call, encode_call

log = logging.getLogger("headrace.gateway")

MARK = b"\x89hrO\r\n\x1a\n"
_HEAD = struct.Struct("<8sQI")


class Spool:
    """One process' own: the file is locked as long as it is open."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.aside = path.with_name(f"{path.name}.damaged")
        self.damaged = 0  # bytes that could not be read
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise JournalLocked(
                f"outbox {path} is in use by another gateway; give each a --journal of its own"
            ) from None
        self._size = os.fstat(self._fd).st_size
        self._lock = asyncio.Lock()

    def read(self) -> Iterator[tuple[str, Block]]:
        """What an earlier process left. A torn end was never acknowledged; it is cut off, so that what is written next
        stands behind a whole frame. Damage before it goes into a file of its own, and is counted."""
        data = self._path.read_bytes()
        at = end = 0  # where to look, and behind the last whole frame
        while (start := data.find(MARK, at)) >= 0:
            found = _frame(data, start)
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
            if data.find(MARK, end + 1) >= 0:  # more than one frame was there: no torn end, but damage
                self._set_aside(data[end:])
            os.ftruncate(self._fd, end)
            self._size = end

    def _set_aside(self, piece: bytes) -> None:
        log.error("outbox %s: %d bytes are damaged; they are kept in %s", self._path, len(piece), self.aside)
        self.damaged += len(piece)
        with self.aside.open("ab") as file:
            file.write(piece)

    async def append(self, channel: str, block: Block) -> None:
        """Writes a call down; returns once it is on disk."""
        frame = encode_call("submit", {"channel": channel, "timeout": None}, block)
        record = _HEAD.pack(MARK, len(frame), crc32c.crc32c(frame)) + frame
        async with self._lock:
            await asyncio.get_running_loop().run_in_executor(None, self._write, record)

    def _write(self, record: bytes) -> None:
        view = memoryview(record)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self._size)  # nobody was told that it is there
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


def _frame(data: bytes, at: int) -> tuple[tuple[str, Block], int] | None:
    """The call in the frame that begins here, and where it ends; None where it is not whole."""
    if at + _HEAD.size > len(data):
        return None
    _, length, checksum = _HEAD.unpack_from(data, at)
    end = at + _HEAD.size + length
    frame = data[at + _HEAD.size : end]
    if len(frame) != length or crc32c.crc32c(frame) != checksum:
        return None
    try:
        _, args, block = decode_call(frame)
    except HeadraceError:
        return None
    return None if block is None else ((args["channel"], block), end)
