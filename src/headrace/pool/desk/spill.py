"""Scratch files for what does not fit into memory. They have no name, so whatever becomes of the process, none is left.

A file lives for as long as anything in it is referred to: a snapshot that is being written may still read what the desk
has let go.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from headrace.data.frame import Buffer
from headrace.pool.errors import DiskFull, JournalError

#: Bytes of one file: what the last group in it keeps on the disk, at most.
FILE_BYTES = 32_000_000
Write = Callable[[int, Sequence[Buffer]], None]
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Scratch:
    """One nameless file."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.fd = self._file.fileno()
        self.size = 0

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def _write(fd: int, buffers: Sequence[Buffer]) -> None:
    for data in buffers:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


class Spill:
    """Writes to the newest file, and begins another when that one is full. Without a folder: the system's own."""

    def __init__(self, folder: Path | None = None, write: Write = _write) -> None:
        self._folder = folder
        self._write = write
        self._newest: Scratch | None = None

    def write(self, data: bytes) -> tuple[Scratch, int]:
        """The file, and where in it; `DiskFull` where there is no room for it."""
        folder = self._folder or Path(tempfile.gettempdir())
        try:
            if self._newest is None or self._newest.size >= FILE_BYTES:
                self._newest = Scratch(folder)
            file, at = self._newest, self._newest.size
            try:
                self._write(file.fd, [data])
            except OSError:
                os.ftruncate(file.fd, at)
                os.lseek(file.fd, at, os.SEEK_SET)
                raise
            file.size += len(data)
            return file, at
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise JournalError(f"no scratch file in {folder} can be written: {error}") from error
            raise DiskFull(
                f"no room in {folder} for {len(data)} bytes that do not fit into memory ({error.strerror}); nothing "
                "was taken: free some, or let the trainer catch up, then send it again"
            ) from error

    def let_go(self) -> None:
        self._newest = None


def read_back(file: Scratch, at: int, length: int) -> bytes:
    try:
        data = os.pread(file.fd, length, at)
    except OSError as error:
        raise JournalError(f"a scratch file cannot be read back: {error}") from error
    if len(data) < length:
        raise JournalError(f"a scratch file holds {len(data)} bytes of a group of {length}")
    return data
