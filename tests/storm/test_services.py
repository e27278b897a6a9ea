"""A process of the storm: its clock is wrong by what it is told, restarts change its Python, and a process that ended
for want of memory is no crash."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.storm.log import EventLog
from headrace.storm.services import SlowDisk, StormProcess

#: Says what time it is for each line of its file, which is a FIFO.
TELLS_THE_TIME = """
import sys, time
print(f"clock ready on {sys.argv[1]}", flush=True)
while True:
    with open(sys.argv[2]) as asked:
        for line in asked:
            print("it is", time.time(), time.time_ns(), time.monotonic(), flush=True)
"""
#: Takes memory until there is none, once it is told.
TAKES_MEMORY = """
import sys
print(f"taker ready on {sys.argv[1]}", flush=True)
taken = []
with open(sys.argv[2]) as asked:
    asked.readline()
while True:
    taken.append(bytearray(1 << 20))
"""
#: Starts one that starts two, all of which only wait.
HAS_WORKERS = """
import subprocess, sys
waits = "import time; time.sleep(10_000)"
forks = "import subprocess, sys; [subprocess.Popen([sys.executable, '-c', sys.argv[1]]) for _ in range(2)];" + waits
subprocess.Popen([sys.executable, "-c", forks, waits])
print(f"parent ready on {sys.argv[1]}", flush=True)
exec(waits)
"""
PATIENCE_S = 300.0


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "asked"
    os.mkfifo(path)
    return path


MakeProcess = Callable[..., StormProcess]


@pytest.fixture
async def make_process(tmp_path: Path, fifo: Path) -> AsyncIterator[MakeProcess]:
    made: list[StormProcess] = []

    def make(module: str, source: str, pythons: tuple[str, ...] = (sys.executable,)) -> StormProcess:
        (tmp_path / f"{module}.py").write_text(source)
        one = StormProcess(
            module,
            (module, "nowhere", fifo),
            module,
            logs=tmp_path,
            log=EventLog(tmp_path, "test"),
            env={"PYTHONPATH": str(tmp_path)},
            patience_s=PATIENCE_S,
            pythons=pythons,
        )
        made.append(one)
        return one

    yield make
    for one in made:
        await one.end()


async def ask(fifo: Path) -> None:
    await asyncio.to_thread(fifo.write_text, "now\n")


async def lines(path: Path, start: str, count: int) -> list[str]:
    """The whole lines of a log that begin so, once there are as many."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        whole, _, _ = path.read_text().rpartition("\n")
        found = [line for line in whole.splitlines() if line.startswith(start)]
        if len(found) >= count:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} never had {count} lines that begin with {start!r}")


async def test_a_wall_clock_is_set_while_its_process_runs_and_stays_so_over_a_kill(
    make_process: MakeProcess, fifo: Path, tmp_path: Path
) -> None:
    process = make_process("clock", TELLS_THE_TIME)
    await process.start()
    for number, ahead_s in enumerate((0.0, 86_400.0, -3_600.0), 1):
        process.set_clock(ahead_s)
        await ask(fifo)
        said = (await lines(tmp_path / "clock.log", "it is", number))[-1].split()
        wall, wall_ns, monotonic = float(said[2]), int(said[3]), float(said[4])
        assert wall - time.time() == pytest.approx(ahead_s, abs=PATIENCE_S)
        assert wall_ns / 1e9 == pytest.approx(wall, abs=1)
        assert monotonic == pytest.approx(time.monotonic(), abs=PATIENCE_S)
    await process.kill()
    await process.start()
    await ask(fifo)
    said = (await lines(tmp_path / "clock.log", "it is", 1))[-1].split()
    assert float(said[2]) - time.time() == pytest.approx(-3_600, abs=PATIENCE_S)


async def test_a_restart_changes_the_python_and_a_kill_does_not(make_process: MakeProcess, tmp_path: Path) -> None:
    other = tmp_path / "other-python"
    other.write_text(f'#!/bin/sh\necho "another one"\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    process = make_process("clock", TELLS_THE_TIME, (sys.executable, str(other)))
    runs = []
    for restart in (False, True, False, True):
        await process.start()
        runs.append("another one" in (tmp_path / "clock.log").read_text())
        if restart:
            await process.end()
            process.take_next_python()
        else:
            await process.kill()
    assert runs == [False, False, True, True]


async def test_a_process_without_memory_ends_and_is_excused(make_process: MakeProcess, fifo: Path) -> None:
    process = make_process("taker", TAKES_MEMORY)
    await process.start()
    assert not process.excuse_end()
    lift = process.limit_memory()
    assert lift is not None
    await ask(fifo)
    until = time.monotonic() + PATIENCE_S
    while not process.crashed and time.monotonic() < until:
        await asyncio.sleep(0.01)
    lift()  # of a process that is gone: nothing happens
    assert process.crashed
    assert process.excuse_end()
    assert not process.crashed
    assert process.limit_memory() is None
    assert await process.start()


async def test_a_disk_is_busy_for_as_long_as_it_is_told(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    until = time.monotonic() + PATIENCE_S
    while not (tmp_path / "busy").exists() and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert (tmp_path / "busy").exists()
    await asyncio.to_thread(disk.stop)
    assert not (tmp_path / "busy").exists()


async def test_workers_are_found_though_who_forked_them_is_gone(make_process: MakeProcess) -> None:
    process = make_process("parent", HAS_WORKERS)
    await process.start()
    while len(workers := process.leaves) != 2:
        await asyncio.sleep(0.01)
    (forks,) = process.parents
    try:
        os.kill(forks, signal.SIGKILL)
        while process.children and process.parents:
            await asyncio.sleep(0.01)
        assert set(workers) <= set(process.leaves)
        os.kill(workers[0], signal.SIGKILL)
        while workers[0] in process.leaves:
            await asyncio.sleep(0.01)
        assert workers[1] in process.leaves
    finally:
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
