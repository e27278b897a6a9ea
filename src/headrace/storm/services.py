"""The processes of a storm: started as a user would start them, killed, frozen, thawed and started again.

A `StormProcess` is one of them over all of its lives. Its link is told where it listens as soon as it says so: calls
reach it while it is not ready yet, as they do in the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.data.errors import HeadraceError
from headrace.processes import Child, ChildDied
from headrace.storm.log import EventLog
from headrace.storm.network import Link

POLL_S = 0.05
#: Seconds that a process may take to end once it is told to, before it is killed.
END_S = 60.0
#: Where a process runs out of descriptors, the share that is left of those that it had.
DESCRIPTORS_LEFT = 0.6


class Stuck(HeadraceError):
    """Something took longer than the storm's patience."""

    code = "stuck"


class StormProcess:
    """One process, over its lives. `words` is how it says that it listens and is ready (`WORDS ready on ADDRESS`);
    `listens`: it says `listening on` before that. `links` lead to it."""

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
    ) -> None:
        self.name = name
        self.address = ""
        self.lives = 0
        self._command = [sys.executable, "-m", *map(str, arguments)]
        self._words, self._listens = words, listens
        self._file = logs / f"{name}.log"
        self._log, self._env, self._links = log, env, links
        self._patience_s = patience_s
        self._child: Child | None = None
        #: Those of its processes whose end was our doing.
        self._ended: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The running process; None where there is none."""
        child = self._child
        return child.process.pid if child is not None and child.code() is None else None

    @property
    def children(self) -> list[int]:
        """The processes that it started, such as a gateway's workers."""
        return children_of(self.pid) if self.pid is not None else []

    def descendant(self, title: str) -> int | None:
        """A process below it whose title begins so; None where there is none now."""
        found = self.children
        for pid in found:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                    return pid
            found += children_of(pid)  # the list that is gone through grows
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
        child = self._child = Child(self.name, self._command, self._file, self._env)
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
        """SIGKILL, and nothing listens any more. Children of it are not killed: they must notice themselves."""
        child = self._child
        if child is None or child.code() is not None:
            return
        for link in self._links:
            link.point_at(None)
        self._ended.add(child.process.pid)
        child.process.kill()
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
                await asyncio.wait_for(asyncio.to_thread(child.process.wait), END_S)
            except TimeoutError:
                self._log.write("stuck", what="end", target=self.name, waited_s=END_S)
                child.process.kill()
                await asyncio.to_thread(child.process.wait)
        for link in self._links:
            link.point_at(None)
        return child.process.returncode

    def signal(self, number: signal.Signals, pid: int | None = None) -> None:
        """Sends a signal to it, or to one of its children; nothing happens where it is gone."""
        target = pid or self.pid
        if target is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)

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


def _limited(pid: int, what: int, limit: int) -> Callable[[], None]:
    """Sets a process' soft limit; what it returns sets it back."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))

    def lift() -> None:
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile: the next life has no such limit
            resource.prlimit(pid, what, before)

    return lift


def children_of(pid: int) -> list[int]:
    """The processes that another started; none where it is gone, or the system does not tell."""
    try:
        listed = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for line in listed for child in line.split()]
