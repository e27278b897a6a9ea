"""A `headrace pool serve` as a child process: started, killed, started again on the same journal and port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.data.errors import HeadraceError

READY = "pool ready on "


class PoolProcess:
    def __init__(self, journal: Path, *, channel: str) -> None:
        self.journal = journal
        self.address = ""
        self.pid = 0
        self._channel = channel
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns once it listens: the first time on a free port, then on the same one, where callers look for it."""
        command = [sys.executable, "-m", "headrace", "pool", "serve", "--port", str(self._port)]
        command += ["--journal", str(self.journal), "--channel", self._channel]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(READY):
            said = process.communicate()[1].strip().splitlines()
            raise HeadraceError(
                f"the pool's process did not start: {said[-1] if said else f'exit {process.returncode}'}"
            )
        self.pid = process.pid
        self.address = line.removeprefix(READY).strip()
        self._port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed. Returns once the process is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.communicate()
