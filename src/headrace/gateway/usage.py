"""How much tenants use, counted over all processes that serve one port.

Each tenant has a row of numbers: its buckets of calls and tokens, as they were last changed, and its requests under way
in each worker. A process alone keeps the rows in its own memory; workers keep them in one file that all of them map, in
a folder of their parent's. Whoever decides by a row holds the file's lock, which the system takes back from a process
that dies. A worker writes only its own count of requests, which is cleared when the worker ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
from array import array
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from pathlib import Path

#: Bytes of a number: all are floats.
NUMBER_BYTES = 8
#: Where a row has the two numbers of its calls' bucket, those of its tokens', and the first worker's count.
CALLS, TOKENS, UNDER_WAY = 0, 2, 4


class UsageTable:
    """The rows of all tenants; those of one process where no file is given."""

    def __init__(self, tenants: int, *, workers: int = 1, worker: int = 0, path: Path | None = None) -> None:
        """`worker` is the number of this process among `workers`. The file at `path` is one that `create` made."""
        self._width = UNDER_WAY + workers
        self._workers = workers
        self._worker = worker
        size = tenants * self._width
        self._file = path.open("r+b") if path is not None else None
        self._numbers: MutableSequence[float]
        if self._file is None:
            self._numbers = array("d", bytes(size * NUMBER_BYTES))
        else:
            self._map = mmap.mmap(self._file.fileno(), size * NUMBER_BYTES)
            self._numbers = memoryview(self._map).cast("d")  # type: ignore[assignment]

    @staticmethod
    def create(path: Path, tenants: int, workers: int) -> None:
        """Makes a file in which nothing is used yet."""
        path.write_bytes(bytes(max(1, tenants) * (UNDER_WAY + workers) * NUMBER_BYTES))

    def row(self, tenant: int) -> TenantUsage:
        """What one tenant uses; tenants have the same numbers in all processes."""
        return TenantUsage(self, tenant * self._width)

    def clear(self, tenants: int, worker: int) -> None:
        """Forgets the requests under way in a worker that ended."""
        for tenant in range(tenants):
            self._numbers[tenant * self._width + UNDER_WAY + worker] = 0.0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While nobody else decides by what is used."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def bucket(self, at: int) -> tuple[float, float] | None:
        """A bucket's level, and since when; None where it was never used."""
        level, since = self._numbers[at], self._numbers[at + 1]
        return (level, since) if since else None

    def set_bucket(self, at: int, level: float, since: float) -> None:
        """What is in a bucket from here on."""
        self._numbers[at], self._numbers[at + 1] = level, since

    def under_way(self, at: int) -> int:
        """Requests under way in all workers."""
        begin = at + UNDER_WAY
        return int(sum(self._numbers[begin : begin + self._workers]))

    def add_under_way(self, at: int, more: int) -> None:
        """Counts requests of this worker."""
        self._numbers[at + UNDER_WAY + self._worker] += more


class TenantUsage:
    """One tenant's row."""

    def __init__(self, table: UsageTable, at: int) -> None:
        self._table = table
        self._at = at
        self.locked = table.locked

    @property
    def under_way(self) -> int:
        """Its requests under way, in all workers."""
        return self._table.under_way(self._at)

    def add_under_way(self, more: int) -> None:
        """Counts requests of this worker."""
        self._table.add_under_way(self._at, more)

    def bucket(self, which: int) -> tuple[float, float] | None:
        """The level of its bucket `CALLS` or `TOKENS`, and since when; None where it was never used."""
        return self._table.bucket(self._at + which)

    def set_bucket(self, which: int, level: float, since: float) -> None:
        """What is in the bucket from here on."""
        self._table.set_bucket(self._at + which, level, since)
