"""Real servers for tests: a pool behind uvicorn in this process, and one in a process of its own that can be killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace import DataPool
from headrace.pool.http import PoolServer

CHILD = """
import sys
from headrace import DataPool
from headrace.pool.http import PoolServer
pool = DataPool(journal=sys.argv[1], durability="os")
PoolServer(pool, port=int(sys.argv[2])).run(ready=lambda address: print(address, flush=True))
"""


@contextmanager
def serving(pool: DataPool, **options: object) -> Iterator[str]:
    """The address of a pool that is served until the block ends."""
    server = PoolServer(pool, port=0, **options)  # type: ignore[arg-type]
    bound = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"ready": lambda _: bound.set()}, daemon=True)
    thread.start()
    assert bound.wait(120)
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(120)


class ServedPool:
    """A pool served by a child process on a port that stays the same over restarts."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        port = self.address.rpartition(":")[2] or "0"
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(self.journal), port], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address.startswith("http://"), "the server did not start"
        return self.address

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        code = self._process.wait(120)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return code

    def __enter__(self) -> ServedPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()
