"""The original Trajectory API, as a process of its own: its state cannot be emptied, so every scenario gets another."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.venvs import ATROPOS

READY_S = 120
STOP_S = 20


@contextmanager
def original(log: Path) -> Iterator[str]:
    """The address of a fresh server; what it says goes to `log`."""
    with running(["-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port"], log) as address:
        yield address


@contextmanager
def running(arguments: list[str], log: Path, ready: str = "") -> Iterator[str]:
    """The address of a server in atroposlib's Python, whose last argument is its port; up once `ready` answers."""
    port = _free_port()
    command = [str(ATROPOS.python()), *arguments, str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        _await_ready(process, f"{address}{ready}", log)
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


def _await_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            httpx.get(address, timeout=5, trust_env=False)
        except httpx.TransportError:
            if process.poll() is not None or time.monotonic() > end:
                said = log.read_text(errors="replace")
                raise RuntimeError(f"Atropos' server did not start at {address}.\n{said}") from None
            time.sleep(0.1)  # there is no event of another process's to await
        else:
            return
