"""Where the dashboard reads: a pool that runs, here or elsewhere, or a journal's folder. Nothing is changed there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace.data.trajectory import Trajectory
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Gone
from headrace.pool.readonly import JournalView, check_journal
from headrace.pool.remote import RemotePool

Row = dict[str, Any]

#: A journal is read again after so many times the seconds that reading it took.
REST_FACTOR = 20.0
#: Events that are asked for at a time and kept, and how often: a pool keeps some thousands.
EVENTS_A_PAGE, EVENT_PAGES = 500, 40


class PoolSource(Protocol):
    """What the dashboard asks; every call blocks, and raises `HeadraceError` where the pool does not answer."""

    title: str

    def refresh(self) -> None:
        """Brings what the other calls answer up to date, where that is not so by itself."""

    def stats(self) -> Row: ...

    def groups(self, channel: str, cursor: str, limit: int) -> Row: ...

    def steps(self, channel: str, cursor: str, limit: int) -> Row: ...

    def states(self, channel: str, uids: list[str]) -> list[Row]: ...

    def trajectory(self, channel: str, uid: str) -> Trajectory: ...

    def consumed(self, channel: str) -> Iterator[Trajectory]:
        """Trajectories that a trainer has taken, where they can still be read."""

    def events(self) -> list[Row]:
        """The latest things that the pool noted: drops, late rewards, redeliveries, versions."""

    @property
    def journal(self) -> Path | None:
        """The folder of its journal, where that can be read from here."""

    @property
    def editable(self) -> bool:
        """Whether `curate` and `reward` are carried out."""

    def curate(self, channel: str, uid: str, step: int, changes: Row) -> None: ...

    def reward(self, channel: str, uid: str, step: int, reward: float, source: str) -> str: ...


class RunningPool:
    """A pool that runs: embedded in this process, over HTTP, or a Ray actor. It stays the caller's. `editable`: people
    may curate it."""

    def __init__(self, pool: DataPool | RemotePool, title: str, *, editable: bool = False) -> None:
        self._pool = pool
        self.title, self.editable = title, editable

    def refresh(self) -> None:
        """Nothing is to be done: each call asks the pool."""

    def stats(self) -> Row:
        found: Row = self._pool.stats()
        return found

    def groups(self, channel: str, cursor: str, limit: int) -> Row:
        return self._pool.list_groups(channel, cursor=cursor, limit=limit)

    def steps(self, channel: str, cursor: str, limit: int) -> Row:
        return self._pool.list_steps(channel, cursor=cursor, limit=limit)

    def states(self, channel: str, uids: list[str]) -> list[Row]:
        return self._pool.trajectory_states(uids, channel)

    def trajectory(self, channel: str, uid: str) -> Trajectory:
        return self._pool.trajectory(uid, channel)

    def consumed(self, channel: str) -> Iterator[Trajectory]:
        return iter(())

    def curate(self, channel: str, uid: str, step: int, changes: Row) -> None:
        self._pool.curate(uid, step, channel, **changes)

    def reward(self, channel: str, uid: str, step: int, reward: float, source: str) -> str:
        said: str = self._pool.reward(uid, reward, step, channel, source=source)
        return said

    def events(self) -> list[Row]:
        found: list[Row] = []
        for _ in range(EVENT_PAGES):
            page = self._pool.events(found[-1]["cursor"] + 1 if found else 0, limit=EVENTS_A_PAGE)
            found = [*found, *(msgspec.to_builtins(event) for event in page)][-EVENTS_A_PAGE:]
            if len(page) < EVENTS_A_PAGE:
                break
        return found

    @property
    def journal(self) -> Path | None:
        """Of a pool in this process alone: another one's may be on another machine."""
        found = self._pool.describe()["journal"] if isinstance(self._pool, DataPool) else None
        return None if found is None else Path(found)


class JournalFolder(RunningPool):
    """A journal's folder, also one that a process has open: read as it was at one moment, and again when it changed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._seen: tuple[Any, ...] = ()
        self._next_reading = 0.0
        self._view: JournalView | None = None
        self._in_use = threading.Lock()  # the view: an export reads in another thread than the one that refreshes
        self.title, self.editable = str(folder), False
        check_journal(folder)
        self.refresh()

    def refresh(self) -> None:
        if self._view is not None and self._clock() < self._next_reading:
            return
        found = fingerprint(self._folder)
        if found == self._seen:
            return
        begun = self._clock()
        view = JournalView(self._folder, live=True, consumed=True)
        with self._in_use:
            before, self._view, self._pool = self._view, view, view
        if before is not None:
            before.close()
        self._seen = found
        self._next_reading = self._clock() + REST_FACTOR * (self._clock() - begun)

    def consumed(self, channel: str) -> Iterator[Trajectory]:
        assert self._view is not None
        return self._view.consumed(channel)

    def trajectory(self, channel: str, uid: str) -> Trajectory:
        """Also one that was consumed, as far as the journal still holds it. Asked by any thread."""
        with self._in_use:
            try:
                return super().trajectory(channel, uid)
            except Gone:
                found = self._view.consumed_trajectory(uid, channel) if self._view is not None else None
                if found is None:
                    raise
                return found

    @property
    def journal(self) -> Path:
        return self._folder

    def close(self) -> None:
        """Frees what was read."""
        if self._view is not None:
            self._view.close()


def fingerprint(folder: Path) -> tuple[Any, ...]:
    """What changes when the journal does: its files, their sizes and times."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return tuple((path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in files)
