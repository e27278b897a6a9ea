"""Where the desk keeps its groups' bytes: in memory as far as they fit, the newest beyond that on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from headrace.data.scored.piece import Piece
from headrace.pool.desk.spill import Scratch, Spill, read_back
from headrace.pool.errors import DiskFull


class Spilled(msgspec.Struct, frozen=True, gc=False):
    """A piece whose bytes lie in a scratch file."""

    file: Scratch
    at: int
    length: int
    size: int
    crc: int

    def read(self) -> Piece:
        return Piece(read_back(self.file, self.at, self.length), self.size, self.crc)


Held = Piece | Spilled


class Shelf:
    def __init__(self, memory_bytes: int) -> None:
        self.spill = Spill()
        self.memory = 0  # bytes held there
        self.spilled = 0
        self._limit = memory_bytes
        self._held: dict[int, Held] = {}
        self._staged: dict[int, Spilled] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def __len__(self) -> int:
        return len(self._held)

    def stage(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Puts on the disk what will not fit, before anybody is told that it was taken; `DiskFull` where it cannot."""
        self._staged.clear()
        memory = self.memory
        for number, piece in pieces:
            if memory + len(piece.data) > self._limit:
                self._staged[number] = self._written(piece)
            else:
                memory += len(piece.data)

    def put(self, number: int, piece: Piece) -> None:
        """Takes a piece in, whatever the disk has room for: it was acknowledged, or is read back from a journal."""
        staged = self._staged.pop(number, None)
        if staged is None and self.memory + len(piece.data) > self._limit:
            with suppress(DiskFull):
                staged = self._written(piece)
        if staged is None:
            self.memory += len(piece.data)
        else:
            self.spilled += staged.length
        self._held[number] = piece if staged is None else staged

    def held(self, number: int) -> Held:
        """What may be read later, whatever becomes of the group meanwhile."""
        return self._held[number]

    def piece(self, number: int) -> Piece:
        return whole(self._held[number])

    def drop(self, number: int) -> None:
        held = self._held.pop(number, None)
        if isinstance(held, Piece):
            self.memory -= len(held.data)
        elif held is not None:
            self.spilled -= held.length

    def clear(self) -> None:
        self._held.clear()
        self._staged.clear()
        self.memory = self.spilled = 0
        self.spill.let_go()

    def _written(self, piece: Piece) -> Spilled:
        file, at = self.spill.write(piece.data)
        return Spilled(file, at, len(piece.data), piece.size, piece.crc)


def whole(held: Held) -> Piece:
    return held if isinstance(held, Piece) else held.read()
