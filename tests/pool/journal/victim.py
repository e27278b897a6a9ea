"""A process that works on a journal until it kills itself at a chosen call to the file system.

Run as `python -m tests.pool.journal.victim`, it takes a case a line on its standard input, forks a child for it, and
answers with what the child had acknowledged. Forking spares every case the start of an interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.pool.journal.kit import Unsynced, one

from headrace import DataPool
from headrace.data.frame import Buffer
from headrace.pool.journal.files import Files
from headrace.pool.journal.repair import repair

Tell = Callable[[str, Any], None]


class Killing(Unsynced):
    """Files that end the process, as `kill -9` does, before, after or half-way through the n-th call of a kind.

    What reached the kernel outlives the process, synced or not, so nothing is really synced: that would only take time.
    """

    def __init__(self, call: str = "", nth: int = 0, when: str = "") -> None:
        self.point = (call, nth, when)
        self.calls: Counter[str] = Counter()

    def _count(self, call: str) -> int:
        self.calls[call] += 1
        self._die(call, "before")
        return self.calls[call]

    def _die(self, call: str, when: str) -> None:
        if (call, self.calls[call], when) == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def create(self, path: Path) -> int:
        self._count("create")
        fd = super().create(path)
        self._die("create", "after")
        return fd

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        self._count("write")
        if self.point == ("write", self.calls["write"], "half"):
            whole = b"".join(buffers)
            super().write(fd, [whole[: len(whole) // 2]])
            self._die("write", "half")
        super().write(fd, buffers)
        self._die("write", "after")

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)
        self._die("sync", "after")

    def sync_dir(self, directory: Path) -> None:
        self._count("sync_dir")
        super().sync_dir(directory)
        self._die("sync_dir", "after")

    def truncate(self, fd: int, size: int) -> None:
        self._count("truncate")
        super().truncate(fd, size)
        self._die("truncate", "after")

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename")
        super().rename(old, new)
        self._die("rename", "after")

    def link(self, old: Path, new: Path) -> None:
        self._count("link")
        super().link(old, new)
        self._die("link", "after")

    def unlink(self, path: Path) -> None:
        self._count("unlink")
        super().unlink(path)
        self._die("unlink", "after")

    def reserve(self, path: Path, size: int) -> None:
        self._count("reserve")
        super().reserve(path, size)
        self._die("reserve", "after")


def work(folder: Path, durability: Any, files: Files, tell: Tell) -> None:
    """A short life: submits, hand-outs, leases, failures, a snapshot, a forgotten trajectory, over several segments."""
    pool = DataPool(folder, durability=durability, segment_mb=0.0015, files=files)

    def submit(name: str, n: int) -> None:
        uids = [f"{name}/{i}" for i in range(n)]
        tell("trying", uids)
        pool.submit_steps([one(uid, name) for uid in uids])
        tell("kept", uids)

    submit("a", 1)
    submit("b", 3)
    for name in "cdef":
        submit(name, 2)
    batch = pool.fetch_batch(2, timeout=0)
    tell("consumed", [step.trajectory_uid for step in batch.steps])
    lease = pool.fetch_batch(1, lease_s=1e6, timeout=0)
    lease.ack()
    tell("consumed", [step.trajectory_uid for step in lease.steps])
    pool.reward("e/0", 0.5, source="person")
    tell("rewarded", "e/0")
    pool.open("e/2", "e")
    pool.fail("e/2", "it broke")
    tell("failed", "e/2")
    pool.compact()
    submit("g", 2)
    pool.fetch_batch(1, lease_s=1e6, timeout=0).nack()
    pool.forget("f/1")
    tell("forgotten", "f/1")
    submit("h", 4)
    pool.fail("h/0", "it broke", quarantine=True)
    tell("failed", "h/0")
    pool.close()


def mend(folder: Path, files: Files) -> None:
    repair(folder, files)


def run(case: dict[str, Any], tell: Tell) -> None:
    files = Killing(*case.get("point", ()))
    if case["what"] == "work":
        work(Path(case["folder"]), case["durability"], files, tell)
    elif case["what"] == "open":
        DataPool(case["folder"], files=files).close()
    else:
        mend(Path(case["folder"]), files)
    tell("calls", dict(files.calls))


def tell(into: int, what: str, value: Any) -> None:
    os.write(into, json.dumps([what, value]).encode() + b"\n")


def serve() -> None:
    for line in sys.stdin:
        case = json.loads(line)
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(out)
            code = 1
            try:
                run(case, partial(tell, into))
                code = 0
            finally:
                os._exit(code)
        os.close(into)
        with os.fdopen(out) as said:
            told = [json.loads(told) for told in said]
        status = os.waitpid(child, 0)[1]
        print(json.dumps({"told": told, "code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
