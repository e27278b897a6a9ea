"""Which sessions in the memory of workers are out of date, told without a message: by a table that all of them map.

A trajectory has a place in the table, by its uid's checksum, with the number of changes that were made there. A session
remembers the number that it was read at; where another stands there now, its trajectory was completed, failed, moved or
deleted in some worker, and is read from the pool again. Trajectories that share a place cost each other no more than
that.
"""

from __future__ import annotations

import fcntl
import mmap
import zlib
from pathlib import Path

#: Places in the table: with a thousand trajectories under way, one change in 250 has another of them read again.
PLACES = 1 << 18
#: Bytes of a place.
NUMBER_BYTES = 8


class SessionStamps:
    """The table as one worker maps it."""

    def __init__(self, path: Path) -> None:
        """The file at `path` is one that `create` made."""
        self._file = path.open("r+b")
        self._numbers = memoryview(mmap.mmap(self._file.fileno(), PLACES * NUMBER_BYTES)).cast("q")

    @staticmethod
    def create(path: Path) -> None:
        """Makes a table in which nothing has changed."""
        with path.open("wb") as file:
            file.truncate(PLACES * NUMBER_BYTES)

    def of(self, uid: str) -> int:
        """How often something changed where this trajectory's place is."""
        return int(self._numbers[zlib.crc32(uid.encode()) % PLACES])

    def change(self, uid: str) -> None:
        """Has every worker read this trajectory again before its next call."""
        at = zlib.crc32(uid.encode()) % PLACES
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._numbers[at] += 1
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
