"""A journal to read, without a pool that runs on it. Nothing in its folder is written, cut off or deleted.

What is read is what a pool opened now would find: leases that ran out are queued again, groups past their time are
gone. A shared lock is held meanwhile, so that no pool starts to write under the reader.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalDamaged, JournalLocked, NotFound, PoolError
from headrace.pool.journal.files import read_layout
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.repair import holder
from headrace.pool.journal.scan import OnCommit, Scan, scan
from headrace.pool.operation import Operation, Read


class JournalView(DataPool):
    """The reading calls of a pool over a journal at rest; the others are refused."""

    def __init__(self, directory: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.directory = Path(directory)
        self._held: int | None = lock_shared(self.directory)
        try:
            super().__init__(clock=clock)
            # Without a journal of its own: what recovery sets right, it sets right in memory.
            at_rest = _AtRest(self.directory)
            self._recover(at_rest)
            self.found = at_rest.found
        except BaseException:
            self._let_go()
            raise

    @property
    def orphans(self) -> dict[str, int]:
        """Facts about what is not there, by kind: none in a journal that is whole."""
        return dict(self._state.orphans)

    def execute(self, operation: Operation[Any], then: Callable[[Any], Any] | None = None) -> Any:
        self._check_reads(operation)
        return super().execute(operation, then)

    async def execute_async(
        self, operation: Operation[Any], then: Callable[[Any], Any] | None = None, *, pieces: bool = False
    ) -> Any:
        self._check_reads(operation)
        return await super().execute_async(operation, then, pieces=pieces)

    def _check_reads(self, operation: Operation[Any]) -> None:
        if not isinstance(operation, Read):
            raise PoolError(
                f"{operation.name!r} changes a pool, and this one is only read from {self.directory}; "
                "open DataPool(journal=...)"
            )

    def describe(self) -> dict[str, Any]:
        return {"durability": "at rest", "journal": str(self.directory), "journal_bytes": self.found.bytes}

    def __enter__(self) -> JournalView:
        return self

    def close(self) -> None:
        super().close()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            unlock(self._held)
            self._held = None


class _AtRest(Journal):
    """A journal that is read and left as it is."""

    found: Scan

    def open(self, take: OnCommit) -> Scan:
        self.found = scan(self.directory, take)
        if self.found.damage:
            raise JournalDamaged(
                f"journal {self.directory} is damaged in {self.found.damage[0]}. `headrace pool verify "
                f"{self.directory}` says what else; `headrace pool repair {self.directory}` puts everything around it "
                "in place"
            )
        return self.found


def lock_shared(directory: Path) -> int:
    """Keeps pools away from a journal for as long as the descriptor lives; `JournalLocked` where one is there."""
    if not directory.is_dir():
        raise NotFound(f"no journal at {directory}: there is no such folder")
    layout = read_layout(directory)
    if not layout.segments and layout.snapshot is None and not layout.missing:
        raise NotFound(f"no journal in {directory}: it holds no segment and no snapshot")
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise JournalLocked(
            f"journal {directory} is open in {holder(directory)}; connect to that pool (http://... or "
            "ray-actor://...) instead, or stop it first"
        ) from None
    return held


def unlock(held: int) -> None:
    """Ends what `lock_shared` began."""
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)
