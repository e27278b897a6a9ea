"""A journal to read, without a pool that runs on it. Nothing in its folder is written, cut off or deleted.

What is read is what a pool opened now would find: leases that ran out are queued again, groups past their time are
gone. A shared lock is held meanwhile, so that no pool starts to write under the reader; only who reads a journal that
may be open (`live`) does without, and sees it as it was at one moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.data.trajectory import Trajectory
from headrace.pool.config import DEFAULT_MEMORY_MB
from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalDamaged, JournalError, JournalLocked, NotFound, PoolError
from headrace.pool.facts import Fact
from headrace.pool.journal.files import read_layout
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.payloads import PayloadFiles
from headrace.pool.journal.repair import holder
from headrace.pool.journal.scan import OnCommit, Scan, scan
from headrace.pool.operation import Operation, Read
from headrace.pool.views import trajectory_view

#: Readings of a journal that is open. One fails where a file is rewritten or begun under it, which happens once in
#: dozens of megabytes: several in a row mean damage.
LIVE_READINGS = 5
#: Groups that a view with `consumed` keeps of those that were used: all of them.
EVERY_GROUP = 2**31


class JournalView(DataPool):
    """The reading calls of a pool over a journal; the others are refused.

    `live`: a process may have the journal open, and go on writing; else such a one is refused (`JournalLocked`).
    `consumed`: groups that were handed out for good are kept too, as far as the journal still holds them; see
    `consumed`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        live: bool = False,
        consumed: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self._keep_consumed = consumed
        self._held: int | None = None
        if live:
            check_journal(self.directory)
        else:
            self._held = lock_shared(self.directory)
        try:
            self._read(LIVE_READINGS if live else 1, clock)
        except BaseException:
            self._let_go()
            raise

    def _read(self, readings: int, clock: Callable[[], float]) -> None:
        for left in reversed(range(readings)):
            # Without a journal of its own: what recovery sets right, it sets right in memory.
            super().__init__(clock=clock)
            self._state.memory.limit = int(DEFAULT_MEMORY_MB * 1e6)  # it has a journal that the rest can be read from
            at_rest = _AtRest(self.directory)
            at_rest.payloads = PayloadFiles(held=self._held is None)
            try:
                self._recover(at_rest)
            except JournalError:
                if not left:
                    raise
                continue
            self.found = at_rest.found
            return

    def _replayed(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        if not self._keep_consumed:
            return facts
        return [_with_history(fact) for fact in facts]

    def consumed(self, channel: str) -> Iterator[Trajectory]:
        """The trajectories of groups that were handed out for good, oldest group first: those that the journal has not
        compacted away, in a view that was opened with `consumed`."""
        there = self._state.look(channel)
        for group in there.history.values():
            for trajectory in group.trajectories.values():
                yield trajectory_view(there, trajectory)

    def consumed_trajectory(self, trajectory_uid: str, channel: str) -> Trajectory | None:
        """One of those that `consumed` gives; None where there is none of that name."""
        there = self._state.look(channel)
        for group in there.history.values():
            if trajectory_uid in group.trajectories:
                return trajectory_view(there, group.trajectories[trajectory_uid])
        return None

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
        about = {"durability": "at rest", "journal": str(self.directory), "journal_bytes": self.found.bytes}
        return {**about, **self._payload_bytes()}

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


def _with_history(fact: Fact) -> Fact:
    """A fact about a channel's options, with a history that keeps all that is consumed."""
    config = getattr(fact, "config", None)
    if config is None:
        return fact
    return msgspec.structs.replace(fact, config=msgspec.structs.replace(config, history_size=EVERY_GROUP))


def check_journal(directory: Path) -> None:
    """Raises `NotFound` where a folder holds no journal."""
    if not directory.is_dir():
        raise NotFound(f"no journal at {directory}: there is no such folder")
    layout = read_layout(directory)
    if not layout.segments and layout.snapshot is None and not layout.missing:
        raise NotFound(f"no journal in {directory}: it holds no segment and no snapshot")


def lock_shared(directory: Path) -> int:
    """Keeps pools away from a journal for as long as the descriptor lives; `JournalLocked` where one is there."""
    check_journal(directory)
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
