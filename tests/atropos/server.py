"""The original Trajectory API, as a process of its own: its state cannot be emptied, so every scenario gets another.

Importing it takes two seconds, so it is imported once, by a process that forks (`inside/fork_api.py`).
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import psutil
from tests.venvs import ATROPOS

INSIDE = Path(__file__).parent / "inside"
READY_S = 120
STOP_S = 20


class Originals:
    """A process that starts originals; it and they end with the process that asks."""

    def __init__(self) -> None:
        command = [str(ATROPOS.python()), str(INSIDE / "fork_api.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(words) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"it ended with {self._process.wait()}"
        return answer.strip()


_originals = cache(Originals)


@contextmanager
def original(log: Path) -> Iterator[str]:
    """The address of a fresh server; what it says goes to `log`."""
    port = _free_port()
    pid = _originals().ask("start", str(port), str(log))
    child = psutil.Process(int(pid))
    try:
        address = f"http://127.0.0.1:{port}"
        _await_ready(lambda: child.status() != psutil.STATUS_ZOMBIE, address, log)
        yield address
    finally:
        _originals().ask("end", pid)


@contextmanager
def running(arguments: list[str], log: Path, ready: str = "") -> Iterator[str]:
    """The address of a server in atroposlib's Python, whose last argument is its port; up once `ready` answers."""
    port = _free_port()
    command = [str(ATROPOS.python()), *arguments, str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        _await_ready(lambda: process.poll() is None, f"{address}{ready}", log)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _await_ready(alive: Callable[[], bool], address: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            httpx.get(address, timeout=5, trust_env=False)
        except httpx.TransportError:
            if not alive() or time.monotonic() > end:
                said = log.read_text(errors="replace")
                raise RuntimeError(f"Atropos' server did not start at {address}.\n{said}") from None
            time.sleep(0.1)  # there is no event of another process's to await
        else:
            return
