"""`headrace pool serve` as a child process, whose memory can be looked at.

`python -m headrace.bench.pool.served ...` is `headrace pool serve ...` and, on SIGUSR1, a `malloc_trim` with a line on
stdout once it is done. So freed memory that the allocator holds on to does not count as growth, and the product needs
no hook for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

READY = "pool ready on "
TRIMMED = "trimmed"


class Served:
    """The child. `address` is where it answers."""

    def __init__(self, *args: str | Path) -> None:
        command = [sys.executable, "-m", "headrace.bench.pool.served", "--port", "0", *map(str, args)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self._line(READY)

    def _line(self, start: str) -> str:
        """The rest of the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line[len(start) :].strip()
        raise RuntimeError(f"the server ended with code {self._process.wait()} before it said {start!r}")

    def memory(self) -> int:
        """Bytes of resident memory after a `malloc_trim`."""
        self._process.send_signal(signal.SIGUSR1)
        self._line(TRIMMED)
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _trim(*_: object) -> None:
    ctypes.CDLL(None).malloc_trim(0)
    print(TRIMMED, flush=True)


if __name__ == "__main__":
    from headrace.cli import main

    signal.signal(signal.SIGUSR1, _trim)
    main(["pool", "serve", *sys.argv[1:]])
