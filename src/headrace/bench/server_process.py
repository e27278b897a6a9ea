"""A server as a child process: started like a user would, known by the address it prints, ended by its id."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.processes import descendants_of

#: How long a server may take until it answers that it is ready: on busy cores, loading a tokenizer takes a minute.
READY_TIMEOUT_S = 120.0


class ServerProcess:
    """`python -m MODULE ARGS`, which prints `... ready on ADDRESS` once it listens, unless that is known before. What
    it says on stderr is told only when it does not do what it should."""

    def __init__(self, module: str, *args: object, python: Path | str = sys.executable, address: str = "") -> None:
        command = [str(python), "-m", module, *map(str, args)]
        self._module = module
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        out = self._stderr if address else subprocess.PIPE  # nobody reads what nothing is to be learned from
        self._process = subprocess.Popen(command, stdout=out, stderr=self._stderr, text=True)
        self._address = address

    @property
    def address(self) -> str:
        """Where it answers; waits for the line that says so."""
        if not self._address:
            self._address = self.read_line(" ready on ", "was ready")
        return self._address

    def read_line(self, marker: str, meaning: str) -> str:
        """What follows `marker` in the next line that has it. Raises where the server ends before: it `meaning`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, found, rest = line.partition(marker)
            if found:
                return rest.strip()
        raise self._failed(f"ended with code {self._process.wait()} before it {meaning}")

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_until(self, path: str) -> None:
        """Asks for `path` until the answer is 200."""
        give_up = time.monotonic() + READY_TIMEOUT_S
        client = BlockingHttpClient(self.address, timeout_s=READY_TIMEOUT_S)
        while True:
            try:
                answer = client.request("GET", path)
                if answer.status == 200:
                    return
                said = f"{answer.status} {answer.body[:500]!r}"
            except NoAnswer as error:  # it does not listen yet
                said = error.reason
                if (code := self._process.poll()) is not None:
                    raise self._failed(f"ended with code {code} before it was ready") from None
            if time.monotonic() > give_up:
                raise self._failed(f"still answers {path} with {said} after {READY_TIMEOUT_S:g} s")
            time.sleep(0.05)

    def _failed(self, what: str) -> RuntimeError:
        self._stderr.seek(0)
        words = self._stderr.read().decode(errors="replace")[-2000:].strip()
        return RuntimeError(f"{self._module} {what}; it said: {words or 'nothing'}")

    def cpu_s(self, *, children: bool = False) -> float:
        """Seconds of CPU that it has used, all threads together, as finely as the system counts; with `children`, those
        of the running processes below it too."""
        pids = [self._process.pid, *(descendants_of(self._process.pid) if children else ())]
        return sum(map(self._cpu_s_of, pids))

    def _cpu_s_of(self, pid: int) -> float:
        clock = ctypes.c_int()
        if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
            raise OSError(error, f"no CPU clock of {self._module}, process {pid}")
        return time.clock_gettime(clock.value)

    def peak_memory(self) -> int:
        """Bytes of resident memory that it had at most."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024

    def memory(self) -> int:
        """Bytes of its resident memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()
