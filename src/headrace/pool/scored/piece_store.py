"""The bytes of scored groups: in memory as far as they fit, the newest beyond that in scratch files.

Scratch files have no name, so none is left behind whatever becomes of the process. A file lives for as long as anything
in it is referred to: a snapshot that is being written may still read what the pool has let go.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from headrace.data.frame import Buffer
from headrace.data.scored.piece import Piece
from headrace.pool.errors import NO_ROOM, DiskFull, JournalError

#: Bytes after which another scratch file is begun: at most so much stays on the disk for the sake of one group.
SCRATCH_FILE_BYTES = 32_000_000

#: Writes all of the buffers at a file descriptor's place.
Write = Callable[[int, Sequence[Buffer]], None]


class ScratchFile:
    """One file without a name; it is gone once nothing refers to it."""

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.fd = self._file.fileno()
        self.size = 0

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def read(self, at: int, length: int) -> bytes:
        """So many bytes from `at` on; `JournalError` where they cannot be read back."""
        try:
            data = os.pread(self.fd, length, at)
        except OSError as error:
            raise JournalError(f"a scratch file cannot be read back: {error}") from error
        if len(data) < length:
            raise JournalError(f"a scratch file holds {len(data)} bytes of a group of {length}")
        return data


def _write(fd: int, buffers: Sequence[Buffer]) -> None:
    for data in buffers:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]


class ScratchFiles:
    """Writes to the newest file, and begins another when that one is full. `folder`: the system's own without one."""

    def __init__(self, folder: Path | None = None, write: Write = _write) -> None:
        self._folder = folder
        self._write = write
        self._newest: ScratchFile | None = None

    def write(self, data: bytes) -> tuple[ScratchFile, int]:
        """The file, and where in it; `DiskFull` where there is no room for it."""
        folder = self._folder or Path(tempfile.gettempdir())
        try:
            if self._newest is None or self._newest.size >= SCRATCH_FILE_BYTES:
                self._newest = ScratchFile(folder)
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
        """Writes to none of them any more; each is gone once nothing refers to it."""
        self._newest = None


class SpilledPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece whose bytes lie in a scratch file."""

    file: ScratchFile
    at: int
    length: int
    size: int
    crc: int


#: What the store has of a group: it can be read later (`load`), whatever becomes of the group meanwhile.
StoredPiece = Piece | SpilledPiece


def load(stored: StoredPiece) -> Piece:
    """The piece with its bytes, from the disk where they are there; `JournalError` if they cannot be read."""
    if isinstance(stored, Piece):
        return stored
    return Piece(stored.file.read(stored.at, stored.length), stored.size, stored.crc)


def stored_bytes(stored: StoredPiece) -> int:
    """Bytes that it takes, in memory or in a scratch file."""
    return len(stored.data) if isinstance(stored, Piece) else stored.length


class PieceStore:
    """Pieces by group number. `memory` and `spilled` are the bytes held in memory and in scratch files."""

    def __init__(self, memory_bytes: int) -> None:
        self.scratch = ScratchFiles()
        self.memory = 0
        self.spilled = 0
        self._limit = memory_bytes
        self._stored: dict[int, StoredPiece] = {}
        self._staged: dict[int, SpilledPiece] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def stage(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Puts on the disk what will not fit into memory, before it is acknowledged; `DiskFull` where it cannot."""
        self._staged.clear()
        memory = self.memory
        for number, piece in pieces:
            if memory + len(piece.data) > self._limit:
                self._staged[number] = self._spill(piece)
            else:
                memory += len(piece.data)

    def put(self, number: int, piece: Piece) -> None:
        """Takes a piece in, whatever the disk has room for: it was acknowledged, or is read back from a journal."""
        staged = self._staged.pop(number, None)
        if staged is None and self.memory + len(piece.data) > self._limit:
            with suppress(DiskFull):
                staged = self._spill(piece)
        if staged is None:
            self.memory += len(piece.data)
        else:
            self.spilled += staged.length
        self._stored[number] = piece if staged is None else staged

    def stored(self, number: int) -> StoredPiece:
        """A group's piece, wherever its bytes are; `load` reads them."""
        return self._stored[number]

    def frozen(self) -> dict[int, StoredPiece]:
        """All of them by number, wherever their bytes are; they stay readable, whatever happens here."""
        return dict(self._stored)

    def piece(self, number: int) -> Piece:
        """A group's piece with its bytes; `JournalError` if they cannot be read."""
        return load(self._stored[number])

    def drop(self, number: int) -> None:
        """Frees a group's bytes; nothing where there are none."""
        stored = self._stored.pop(number, None)
        if isinstance(stored, Piece):
            self.memory -= len(stored.data)
        elif stored is not None:
            self.spilled -= stored.length

    def clear(self) -> None:
        self._stored.clear()
        self._staged.clear()
        self.memory = self.spilled = 0
        self.scratch.let_go()

    def _spill(self, piece: Piece) -> SpilledPiece:
        file, at = self.scratch.write(piece.data)
        return SpilledPiece(file, at, len(piece.data), piece.size, piece.crc)
