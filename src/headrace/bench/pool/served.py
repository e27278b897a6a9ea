"""`headrace pool serve` as a child process, for measuring its memory.

`python -m headrace.bench.pool.served ...` is `headrace pool serve ...` and, on SIGUSR1, a `malloc_trim` with a line on
stdout once it is done. So freed memory that the allocator keeps does not count as growth, and the pool needs no hook
for it.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys
from pathlib import Path

from headrace.bench.server_process import ServerProcess

TRIMMED = "trimmed"


class ServedPool(ServerProcess):
    """The child process; `args` are those of `headrace pool serve`."""

    def __init__(self, *args: str | Path) -> None:
        super().__init__("headrace.bench.pool.served", "--port", 0, *args)

    def memory(self) -> int:
        """Bytes of resident memory after a `malloc_trim`."""
        self.send_signal(signal.SIGUSR1)
        self.read_line(TRIMMED, "trimmed its memory")
        return super().memory()


def _trim(*_: object) -> None:
    ctypes.CDLL(None).malloc_trim(0)
    print(TRIMMED, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _trim)
    sys.argv = ["headrace", "pool", "serve", *sys.argv[1:]]
    runpy.run_module("headrace", run_name="__main__")
