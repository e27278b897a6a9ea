"""The processes of a storm: started as a user would start them, killed, frozen, thawed and started again.

A `StormProcess` is one of them over all of its lives. Its link is told where it listens as soon as it says so: calls
reach it while it is not ready yet, as they do in the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.data.errors import HeadraceError
from headrace.processes import Child, ChildDied, children_of, descendants_of
from headrace.storm.log import EventLog
from headrace.storm.network import Link
from headrace.storm.wrong_clock import AHEAD

POLL_S = 0.05
#: Seconds that a process may take to end once it is told to, before it is killed.
END_S = 60.0
#: Where a process runs out of descriptors, the share that is left of those that it had.
DESCRIPTORS_LEFT = 0.6
#: Where a process runs out of memory, the bytes that it may still take.
MEMORY_LEFT = 4 << 20
#: What is written to a disk at once to keep it busy.
BUSY_BYTES = 16 << 20
#: What runs a module under a clock that can be set.
CLOCK_SCRIPT = Path(__file__).with_name("wrong_clock.py")


class Stuck(HeadraceError):
    """Something took longer than the storm's patience."""

    code = "stuck"


class StormProcess:
    """One process, over its lives. `words` is how it says that it listens and is ready (`WORDS ready on ADDRESS`);
    `listens`: it says `listening on` before that. `links` lead to it. `pythons` run it: the first, and after each
    restart the next, which may have another version of Headrace. `is_machine`: all that it started goes with it."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[object],
        words: str,
        *,
        logs: Path,
        log: EventLog,
        env: Mapping[str, str] | None = None,
        links: Sequence[Link] = (),
        listens: bool = False,
        patience_s: float,
        pythons: Sequence[str] = (sys.executable,),
        is_machine: bool = False,
    ) -> None:
        self.name = name
        self.address = ""
        self.lives = 0
        self._pythons = itertools.cycle(pythons)
        self._python = next(self._pythons)
        self._clock = logs / f"{name}.clock"
        self._arguments = list(map(str, arguments))
        self.set_clock(0.0)
        self._words, self._listens = words, listens
        self._file = logs / f"{name}.log"
        self._log, self._env, self._links = log, env, links
        self._patience_s, self._is_machine = patience_s, is_machine
        self._child: Child | None = None
        #: The processes below it that started none, as they were found last, and when each began.
        self._leaves: dict[int, str] = {}
        #: Those of its processes whose end was our doing.
        self._ended: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The running process; None where there is none."""
        child = self._child
        return child.process.pid if child is not None and child.code() is None else None

    @property
    def children(self) -> list[int]:
        """The processes that it started."""
        return children_of(self.pid) if self.pid is not None else []

    @property
    def parents(self) -> list[int]:
        """Those of its children that started others, such as a gateway's fork server."""
        return [pid for pid in self.children if children_of(pid)]

    @property
    def leaves(self) -> list[int]:
        """The processes below it that started none, such as a gateway's workers. Those that were found once are found
        again, though who forked them is gone."""
        known = self._leaves | {pid: _begun(pid) for pid in self.descendants}
        alive = {pid: begun for pid, begun in known.items() if begun and _begun(pid) == begun}
        self._leaves = {pid: begun for pid, begun in alive.items() if not children_of(pid)}
        return sorted(self._leaves)

    @property
    def descendants(self) -> list[int]:
        """The processes that it started, and those that they started, and so on."""
        return descendants_of(self.pid) if self.pid is not None else []

    def descendant(self, title: str) -> int | None:
        """A process below it whose title begins so; None where there is none now."""
        for pid in self.descendants:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    return pid
        return None

    @property
    def crashed(self) -> bool:
        """Whether it has ended, and not by our doing."""
        child = self._child
        return child is not None and child.code() is not None and child.process.pid not in self._ended

    async def start(self) -> bool:
        """Starts it and returns once it is ready; False where it was killed by us before that. Raises `Stuck` where it
        takes too long, and `ChildDied` where it ends by itself."""
        self.lives += 1
        command = [self._python, str(CLOCK_SCRIPT), str(self._clock), *self._arguments]
        child = self._child = Child(self.name, command, self._file, self._env)
        self._log.write("started", target=self.name, pid=child.process.pid)
        try:
            self.address = await self._said("listening" if self._listens else "ready", child)
            for link in self._links:
                link.point_at(self.address)
            await self._said("ready", child)
        except ChildDied as error:
            if child.process.pid in self._ended:
                return False
            self._log.write("died", target=self.name, how=f"{error}: {error.tail[-1000:]}")
            raise
        self._log.write("ready", target=self.name, pid=child.process.pid)
        return True

    async def _said(self, state: str, child: Child) -> str:
        give_up = time.monotonic() + self._patience_s
        pattern = re.compile(rf"^{self._words} {state} on (\S+)$", re.MULTILINE)
        while time.monotonic() < give_up:
            if found := pattern.search(child.said()):
                return found[1]
            child.check()
            await asyncio.sleep(POLL_S)
        self._log.write("stuck", what="start", target=self.name, waited_s=self._patience_s)
        raise Stuck(f"{self.name} was not {state} within {self._patience_s:g} s; its log is {self._file}")

    async def kill(self) -> None:
        """SIGKILL, and nothing listens any more. Children of it are not killed: they must notice themselves, unless it
        is a machine, which takes all with it."""
        child = self._child
        if child is None or child.code() is not None:
            return
        for link in self._links:
            link.point_at(None)
        self._ended.add(child.process.pid)
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(child.process.wait)

    async def end(self) -> int:
        """SIGTERM, as an operator or an upgrade sends it; SIGKILL where it does not end. Returns its exit code."""
        child = self._child
        if child is None:
            return 0
        if child.code() is None:
            self._ended.add(child.process.pid)
            child.process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await asyncio.to_thread(child.process.wait)
            except TimeoutError:
                self._log.write("stuck", what="end", target=self.name, waited_s=END_S)
                child.process.kill()
                await asyncio.to_thread(child.process.wait)
        for link in self._links:
            link.point_at(None)
        return child.process.returncode

    def signal(self, number: signal.Signals, pid: int | None = None) -> None:
        """Sends a signal to it, to all below it where it is a machine, or to one of its children; nothing happens where
        it is gone."""
        targets = [pid or self.pid, *(self.descendants if pid is None and self._is_machine else [])]
        for target in targets:
            if target is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, number)

    def take_next_python(self) -> None:
        """It is another's process from its next start on."""
        self._python = next(self._pythons)

    def set_clock(self, ahead_s: float) -> None:
        """Sets its wall clock, from now on and over restarts; those of its children stay right."""
        with self._clock.open("wb" if not self._clock.exists() else "r+b") as file:
            file.write(AHEAD.pack(ahead_s))

    def excuse_end(self) -> bool:
        """Whether it has ended by itself, by the storm's doing: it is no crash then."""
        if not self.crashed:
            return False
        assert self._child is not None
        for link in self._links:
            link.point_at(None)
        self._ended.add(self._child.process.pid)
        return True

    def limit_memory(self, pid: int | None = None) -> Callable[[], None] | None:
        """Lets it, or one of its children, have hardly more memory than it has; what it returns takes that back. None
        where it does not run, or the system has no such limit."""
        target = pid or self.pid
        if target is None or not hasattr(resource, "prlimit"):
            return None
        try:
            pages = int(Path(f"/proc/{target}/statm").read_text().split()[0])
        except OSError:
            return None
        return _limited(target, resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_LEFT)

    def limit_descriptors(self, pid: int | None = None) -> Callable[[], None] | None:
        """Lets it, or one of its children, open less than it has open, and breaks all connections to it: not all that
        come back find a descriptor. What it returns takes that back. None where it does not run, or the system has no
        such limit."""
        target = pid or self.pid
        if target is None or not hasattr(resource, "prlimit"):
            return None
        try:
            held = max(map(int, os.listdir(f"/proc/{target}/fd")), default=0)
        except OSError:
            return None
        lift = _limited(target, resource.RLIMIT_NOFILE, int(held * DESCRIPTORS_LEFT))
        for link in self._links:
            link.begin("reset")
        return lift

    def fill_disk(self, folder: Path, pid: int | None = None) -> Callable[[], None] | None:
        """Lets no file of it, or of one of its children, grow beyond the largest in a folder, as a disk without room
        would; what it returns makes room again. None where it does not run, or the system has no such limit."""
        target = pid or self.pid
        if target is None or not hasattr(resource, "prlimit"):
            return None
        sizes = [file.stat().st_size for file in folder.rglob("*.seg")]
        return _limited(target, resource.RLIMIT_FSIZE, max(sizes, default=0) + 1)


class SlowDisk:
    """Keeps the disk of a folder busy: writes and syncs there as fast as it can, until it is told to stop."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "busy"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, name="slow disk", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _write(self) -> None:
        some = os.urandom(BUSY_BYTES)
        try:
            while not self._stopping.is_set():
                with self._file.open("wb") as file:
                    file.write(some)
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            self._file.unlink(missing_ok=True)


def _limited(pid: int, what: int, limit: int) -> Callable[[], None]:
    """Sets a process' soft limit; what it returns sets it back."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))

    def lift() -> None:
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile: the next life has no such limit
            resource.prlimit(pid, what, before)

    return lift


def _begun(pid: int) -> str:
    """When a process began, as the system counts: no two of one number have the same. Empty where it is gone."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else fields[18]
