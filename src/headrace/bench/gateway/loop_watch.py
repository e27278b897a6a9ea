"""A gateway that also measures how long its event loop is held, for `headrace bench gateway`.

    python -m headrace.bench.gateway.loop_watch FILE GATEWAY_FLAGS

A task of the gateway's own loop wakes up every millisecond; by how much it comes too late, nothing else could run
either. The longest is kept in FILE, which both processes see, and the most of such a time that the gateway's process
computed: on a busy machine the rest is other processes'.
"""

from __future__ import annotations

import asyncio
import mmap
import runpy
import struct
import sys
import time
from pathlib import Path
from socket import socket

import uvicorn

from headrace.bench.server_process import ServerProcess

#: Seconds between two times that the task wakes up: what it costs is a fraction of a percent.
BEAT_S = 0.001

_SECONDS = struct.Struct("dd")


class LongestHold:
    """The longest that a loop was held, and the most of it that its process computed, in seconds, in a file; both 0
    after `reset`."""

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(_SECONDS.size))
        with file.open("r+b") as opened:
            self._bytes = mmap.mmap(opened.fileno(), _SECONDS.size)

    def reset(self) -> None:
        self._bytes[:] = _SECONDS.pack(0.0, 0.0)

    def add(self, seconds: float, cpu_s: float) -> None:
        longest, most = _SECONDS.unpack(self._bytes[:])
        if seconds > longest or cpu_s > most:
            self._bytes[:] = _SECONDS.pack(max(seconds, longest), max(cpu_s, most))

    @property
    def seconds(self) -> float:
        found: float = _SECONDS.unpack(self._bytes[:])[0]
        return found

    @property
    def cpu_s(self) -> float:
        found: float = _SECONDS.unpack(self._bytes[:])[1]
        return found


async def watch(longest: LongestHold) -> None:
    """Measures until it is cancelled."""
    while True:
        due = time.perf_counter() + BEAT_S  # a loop's own clock stands still while it is held
        computed = time.process_time()
        await asyncio.sleep(BEAT_S)
        late = time.perf_counter() - due
        longest.add(late, min(late, time.process_time() - computed))


def start_watched_gateway(file: Path, *flags: object) -> ServerProcess:
    """A gateway with these flags, which measures into a file."""
    LongestHold(file).reset()
    return ServerProcess("headrace.bench.gateway.loop_watch", file, *flags)


def _serve(file: str, flags: list[str]) -> None:
    longest = LongestHold(Path(file))
    tasks: list[asyncio.Task[None]] = []  # a loop keeps none alive
    startup = uvicorn.Server.startup

    async def watched(self: uvicorn.Server, sockets: list[socket] | None = None) -> None:
        tasks.append(asyncio.create_task(watch(longest)))
        await startup(self, sockets)

    uvicorn.Server.startup = watched  # type: ignore[method-assign]  # the loop begins here, and nobody else offers it
    sys.argv = ["headrace", "gateway", *flags]
    runpy.run_module("headrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
