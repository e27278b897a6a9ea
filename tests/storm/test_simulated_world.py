"""What a simulation is made of: time that passes only where somebody waits, a disk that forgets what was not synced."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storm.simulation.disk import SimulatedDisk, SimulatedFiles
from headrace.storm.simulation.scheduler import (
    NothingLeft,
    ProcessEnded,
    SimulatedLock,
    SimulatedLoop,
    SimulatedScheduler,
    SimulatedThread,
)


@pytest.fixture
def scheduler() -> Iterator[SimulatedScheduler]:
    made = SimulatedScheduler(random.Random(1))
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path, scheduler: SimulatedScheduler) -> SimulatedDisk:
    return SimulatedDisk(tmp_path, scheduler, random.Random(2))


# -- time and threads --------------------------------------------------------------------------------------------------


def test_an_hour_passes_at_once_and_in_order(scheduler: SimulatedScheduler) -> None:
    loop = SimulatedLoop(scheduler)
    seen: list[tuple[float, str]] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((loop.time(), "slept"))

    async def both() -> None:
        await asyncio.gather(wait(3600), wait(1), loop.run_in_executor(None, scheduler.sleep, 60))
        seen.append((loop.time(), "done"))

    loop.run_until_complete(both())
    loop.close()
    assert seen == [(1.0, "slept"), (3600.0, "slept"), (3600.0, "done")]


def held(scheduler: SimulatedScheduler) -> tuple[SimulatedLock, list[str], SimulatedThread]:
    """A lock that a thread has for four more seconds, who has had it, and that thread."""
    lock = SimulatedLock(scheduler)
    seen: list[str] = []

    def hold() -> None:
        with lock:
            scheduler.sleep(5)
            seen.append("held")

    thread = scheduler.spawn(hold, "holder")
    scheduler.sleep(1)
    return lock, seen, thread


def test_who_waits_for_a_lock_gets_it_when_it_is_free(scheduler: SimulatedScheduler) -> None:
    lock, seen, _ = held(scheduler)
    with lock:
        seen.append("mine")
    assert scheduler.now >= 5
    assert seen == ["held", "mine"]


def test_a_killed_thread_does_not_go_on_and_lets_go_of_its_lock(scheduler: SimulatedScheduler) -> None:
    lock, seen, thread = held(scheduler)
    scheduler.kill([thread])
    with lock:
        assert scheduler.now == 1.0
    assert not seen


def test_waiting_for_what_cannot_come_is_an_error(scheduler: SimulatedScheduler) -> None:
    with pytest.raises(NothingLeft):
        scheduler.park()


# -- the disk ----------------------------------------------------------------------------------------------------------


def test_a_power_failure_keeps_what_was_synced_and_a_kill_everything(disk: SimulatedDisk) -> None:
    path = disk.journal / "a.seg"
    kept: set[bytes] = set()
    for _ in range(40):
        files = SimulatedFiles(disk)
        fd = files.create(path)
        files.sync_dir(disk.journal)
        files.write(fd, [b"safe " * 20])
        files.sync(fd)
        files.write(fd, [b"lost " * 40])
        files.end()
        assert path.read_bytes() == b"safe " * 20 + b"lost " * 40
        disk.lose_power()
        assert path.read_bytes().startswith(b"safe " * 20)
        kept.add(path.read_bytes()[100:])
        SimulatedFiles(disk).unlink(path)
    assert b"" in kept
    assert b"lost " * 40 in kept
    assert len(kept) > 5, "nothing was torn"


def test_a_name_that_was_not_synced_may_be_gone_or_still_be_there(disk: SimulatedDisk) -> None:
    files = SimulatedFiles(disk)
    seen = set()
    for number in range(40):
        old, new = disk.journal / f"{number}.tmp", disk.journal / f"{number}.snap"
        files.close(files.create(old))
        files.sync_dir(disk.journal)
        files.rename(old, new)
        disk.lose_power()
        seen.add((old.exists(), new.exists()))
    assert {(True, False), (False, True)} <= seen


def test_a_full_disk_takes_what_it_has_room_for(disk: SimulatedDisk) -> None:
    files = SimulatedFiles(disk)
    fd = files.create(disk.journal / "a.seg")
    disk.free_bytes = 10
    with pytest.raises(OSError, match="No space left") as caught:
        files.write(fd, [b"sixteen bytes on"])
    assert caught.value.errno == errno.ENOSPC
    assert (disk.journal / "a.seg").read_bytes() == b"sixteen by"
    files.truncate(fd, 0)
    files.write(fd, [b"ten bytes."])


def test_a_process_that_ended_does_nothing_more(disk: SimulatedDisk) -> None:
    files = SimulatedFiles(disk)
    fd = files.create(disk.journal / "a.seg")
    files.fail_within(1, lambda: setattr(files, "ended", True))
    files.write(fd, [b"one"])
    with pytest.raises(ProcessEnded):
        files.write(fd, [b"two"])
    with pytest.raises(ProcessEnded):
        files.sync(fd)
    assert (disk.journal / "a.seg").read_bytes() in [b"one" + b"two"[:size] for size in range(4)]
