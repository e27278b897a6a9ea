"""A full disk: a submit is refused whole, acknowledgements go on, and with room everything does."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Failing, Unsynced, check_rules, one, segment, uids
from tests.pool.kit import SOON, Clock

from headrace import DataPool
from headrace.data.frame import Buffer
from headrace.pool.errors import DiskFull, JournalDamaged
from headrace.pool.journal.files import Files
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.repair import backup, verify

ROOT = Path(__file__).parents[3]
MB = 1_000_000
TOKENS = 10_000  # a step of 40 kB of ids and as much of log-probs


def big(uid: str) -> Any:
    return one(uid, size=TOKENS)


class Small(Unsynced):
    """A disk of so many bytes: what is written and what is reserved take them, what is deleted gives them back."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size

    def _room(self) -> int:
        return self.size - sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def take_the_rest(self) -> None:
        self.size -= self._room()

    def create(self, path: Path) -> int:
        if self._room() <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        whole, room = b"".join(buffers), self._room()
        super().write(fd, [whole[: max(0, room)]])
        if room < len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def reserve(self, path: Path, size: int) -> None:
        if self._room() < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(path, size)


def fill(pool: DataPool, prefix: str = "s") -> tuple[list[str], str]:
    """Submits until there is no room; what was taken, and what the refusal said."""
    taken: list[str] = []
    while True:
        try:
            pool.submit_step(big(f"{prefix}{len(taken)}"))
        except DiskFull as error:
            return taken, str(error)
        taken.append(f"{prefix}{len(taken)}")


def live_through_a_full_disk(
    folder: Path, take_the_rest: Callable[[], None], make_room: Callable[[], None], files: Files | None = None
) -> None:
    """The story that is the same for every kind of disk."""
    pool = DataPool(folder, durability="os", files=files)
    pool.submit_step(big("first"))
    early = pool.fetch_batch(1, lease_s=1e6, timeout=0)
    taken, said = fill(pool)
    assert len(taken) > 3
    assert f"in {folder}" in said
    assert "no room on disk" in said
    assert "nothing of it was stored" in said
    assert uids(pool) == ["first", *taken]
    check_rules(pool._state)
    assert not verify(folder).torn

    take_the_rest()
    early.ack()
    later = pool.fetch_batch(2, lease_s=1e6, timeout=0)
    later.ack()
    pool.reward(taken[-1], 1.0)
    check_rules(pool._state)
    assert uids(pool) == taken[2:]

    make_room()
    assert pool.submit_step(big("after")).accepted == 1
    check_rules(pool._state)
    ledger = pool.stats()["ledger"]
    pool.close()
    with DataPool(folder, durability="os") as pool:
        assert uids(pool) == [*taken[2:], "after"]
        assert pool.stats()["ledger"] == ledger
        assert pool.trajectory(taken[-1]).reward == 1.0
        assert pool.events() == []


def test_a_disk_that_fills_up_refuses_steps_and_takes_acknowledgements(tmp_path: Path) -> None:
    disk = Small(tmp_path, 2 * MB)

    def make_room() -> None:
        disk.size += 2 * MB

    live_through_a_full_disk(tmp_path / "pool", disk.take_the_rest, make_room, disk)


def test_the_room_kept_for_acknowledgements_is_not_given_to_steps(tmp_path: Path) -> None:
    disk = Small(tmp_path, 2 * MB)
    reserve = tmp_path / "pool" / "reserve"
    with DataPool(tmp_path / "pool", durability="os", files=disk) as pool:
        fill(pool)
        disk.take_the_rest()
        assert reserve.exists()
        pool.fetch_batch(1, timeout=0)
        assert not reserve.exists()
        with pytest.raises(DiskFull, match="what is left is kept for acknowledgements"):
            pool.submit_step(one("small"))
        pool.fetch_batch(1, timeout=0)
        disk.size += MB // 2
        assert pool.submit_step(one("small")).accepted == 1
        assert reserve.exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_disk_that_was_full_takes_steps_again_once_they_were_fetched(tmp_path: Path, restart: bool) -> None:
    """Nobody makes room but those who fetch: what they took is compacted away, with the room that was kept."""
    disk = Small(tmp_path, 3 * MB)
    pool = DataPool(tmp_path / "pool", durability="os", files=disk)
    taken, _ = fill(pool)
    disk.take_the_rest()
    if restart:
        pool.close()
        pool = DataPool(tmp_path / "pool", durability="os", files=disk)
    for _ in taken:
        pool.fetch_batch(1, lease_s=1e6, timeout=0).ack()
    for n in range(len(taken) // 2):
        assert pool.submit_step(big(f"again{n}")).accepted == 1
    check_rules(pool._state)
    before = uids(pool)
    pool.close()
    with DataPool(tmp_path / "pool", durability="os", files=disk) as pool:
        assert uids(pool) == before


def test_a_compaction_that_finds_no_room_leaves_nothing_behind_and_the_reserve_in_place(tmp_path: Path) -> None:
    disk = Small(tmp_path, 3 * MB)
    with DataPool(tmp_path / "pool", durability="os", files=disk) as pool:
        fill(pool)
        disk.take_the_rest()
        for _ in range(3):
            with pytest.raises(DiskFull):
                pool.compact()
        left = sorted(path.name for path in (tmp_path / "pool").iterdir())
        assert [name for name in left if name.endswith(".seg")] == ["000000000001.seg", "000000000002.seg"]
        assert "reserve" in left
        pool.fetch_batch(1, lease_s=1e6, timeout=0).ack()
        check_rules(pool._state)


def test_reading_goes_on_when_what_is_due_cannot_be_written_down(tmp_path: Path) -> None:
    now = [1000.0]
    disk = Small(tmp_path, 2 * MB)
    pool = DataPool(tmp_path / "pool", durability="os", files=disk, clock=lambda: now[0])
    pool.submit_step(big("first"))
    lease = pool.fetch_batch(1, lease_s=10, timeout=0)
    fill(pool)
    disk.size = 0
    (tmp_path / "pool" / "reserve").unlink()
    now[0] += 11
    assert pool.stats()["ledger"]["leased"] == 1
    with pytest.raises(DiskFull):
        lease.nack()
    disk.size = 3 * MB
    assert pool.stats()["ledger"]["leased"] == 0
    check_rules(pool._state)
    pool.close()


def test_a_call_that_is_on_disk_is_answered_even_if_what_follows_from_it_is_not(tmp_path: Path) -> None:
    files = Failing()
    pool = DataPool(tmp_path, durability="os", files=files, channels={"train": {"max_queue_size": 1}})
    pool.submit_step(one("a"))
    files.before["write"] = lambda: files.fail.update(write_half=OSError(errno.EIO, os.strerror(errno.EIO)))
    assert pool.submit_step(one("b")).accepted == 1  # which leaves one group too many
    assert not files.fail
    assert uids(pool) == ["b"]
    check_rules(pool._state)
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["b"]


def test_a_full_disk_makes_a_segment_grow_rather_than_refuse_what_fits(tmp_path: Path) -> None:
    class NoNewFiles(Unsynced):
        full = False

        def create(self, path: Path) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().create(path)

    files = NoNewFiles()
    with DataPool(tmp_path, durability="os", files=files, segment_mb=0.001) as pool:
        files.full = True
        for i in range(20):
            pool.submit_step(one(f"s{i}"))
        assert [path.name for path in sorted(tmp_path.glob("*.seg"))] == ["000000000001.seg"]
        files.full = False
        pool.submit_step(one("last"))
    assert segment(tmp_path, 2).exists()
    with DataPool(tmp_path) as pool:
        assert len(uids(pool)) == 21


# -- real limits -------------------------------------------------------------------------------------------------------


def with_a_limit_on_file_size(folder: Path) -> None:
    """Runs in a process of its own, whose files may not grow past 2 MB until it allows itself more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def take_the_rest() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (segment(folder).stat().st_size, limits[1]))

    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MB, limits[1]))
    live_through_a_full_disk(folder, take_the_rest, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))


def test_a_limit_on_file_size_is_a_full_disk(tmp_path: Path) -> None:
    script = "import sys, pathlib; from tests.pool.journal import test_full_disk as story; "
    script += "story.with_a_limit_on_file_size(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pool")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def can_mount() -> bool:
    """Whether this process may mount a file system, tried in a mount namespace of its own."""
    if os.geteuid() != 0:
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


if can_mount():

    def test_a_small_file_system_fills_up(small_disk: Path) -> None:
        filler = small_disk / "filler"
        filler.write_bytes(bytes(MB))

        def take_the_rest() -> None:
            with (small_disk / "rest").open("wb", buffering=0) as rest:
                try:
                    while True:
                        rest.write(bytes(4096))
                except OSError:
                    pass

        live_through_a_full_disk(small_disk / "pool", take_the_rest, filler.unlink)


# -- a quota -----------------------------------------------------------------------------------------------------------


def test_a_quota_refuses_steps_and_says_how_much_is_taken(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", files=Unsynced(), quota_mb=0.5) as pool:
        taken, said = fill(pool)
        assert f"journal {tmp_path} takes 0.5 MB of its quota of 0.5 MB, and this needs 0.1 MB more" in said
        assert "nothing was taken: fetch, compact, or raise the quota" in said
        assert pool.stats()["journal_bytes"] <= 500_000
        assert pool.fetch_batch(1, lease_s=10, timeout=0).ack() is None
        assert uids(pool) == taken[1:]
        check_rules(pool._state)


def test_what_was_consumed_makes_room_under_the_quota_by_itself(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", files=Unsynced(), quota_mb=0.5) as pool:
        for round in range(5):
            taken, _ = fill(pool, f"{round}-")
            assert len(taken) >= 4
            pool.fetch_batch(len(taken), timeout=0)
        check_rules(pool._state)
        assert pool.stats()["ledger"]["consumed"] >= 20


def test_writers_that_meet_a_full_journal_together_all_get_in(tmp_path: Path) -> None:
    """One of them makes room, for all."""
    with DataPool(tmp_path, durability="os", files=Unsynced(), quota_mb=1) as pool, ThreadPoolExecutor(4) as threads:
        taken, _ = fill(pool)
        pool.fetch_batch(len(taken), timeout=0)
        together = threading.Barrier(4)

        def submit(writer: int) -> Any:
            together.wait(120)
            return pool.submit_step(big(f"w{writer}"))

        receipts = [done.result(120) for done in [threads.submit(submit, writer) for writer in range(4)]]
        assert [receipt.accepted for receipt in receipts] == [1] * 4
        assert pool._compactions == 1


def test_a_full_journal_of_what_stays_is_not_rewritten_for_every_refusal(tmp_path: Path) -> None:
    """Tombstones, here: they are most of a snapshot, and none of its steps."""
    with DataPool(tmp_path, durability="os", files=Unsynced()) as pool:
        for n in range(50):
            pool.submit_step(one(f"{n}{'x' * 400}"))
            pool.fetch_batch(1, timeout=0)
        pool.compact()
        assert pool._journal is not None
        pool._journal.quota_bytes = 0
        for _ in range(3):
            with pytest.raises(DiskFull):
                pool.submit_step(one("more"))
        assert pool._compactions == 1


def test_a_full_journal_that_cannot_be_compacted_is_tried_again_later_or_once_less_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    tries: list[float] = []

    def fail(*_: object) -> None:
        tries.append(clock.now)
        raise JournalDamaged("a payload does not match its CRC32C")

    with DataPool(tmp_path, durability="os", files=Unsynced(), quota_mb=0.5, clock=clock) as pool:

        def refused() -> int:
            with pytest.raises(DiskFull):
                pool.submit_step(big("more"))
            return len(tries)

        fill(pool)
        pool.fetch_batch(2, timeout=0)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write_snapshot", fail)
            assert [refused(), refused()] == [1, 1]
            clock.forward(1)
            assert [refused(), refused()] == [2, 2]
            pool.fetch_batch(1, timeout=0)
            assert [refused(), refused()] == [3, 3]
        clock.forward(60)
        assert pool.submit_step(big("more")).accepted == 1
        check_rules(pool._state)


class SlowBackup:
    """A backup that copies nothing until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, directory: Path, to: Path) -> None:
        self.begun.set()
        assert self.go_on.wait(SOON)
        backup(directory, to)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowBackup]:
    found = SlowBackup()
    monkeypatch.setattr("headrace.pool.journaled.backup", found)
    yield found
    found.go_on.set()


def test_a_full_journal_refuses_at_once_while_it_is_backed_up(tmp_path: Path, slow: SlowBackup) -> None:
    pool = DataPool(tmp_path / "pool", durability="os", files=Unsynced(), quota_mb=0.5)
    with ThreadPoolExecutor(2) as threads, pool:
        taken, _ = fill(pool)
        pool.fetch_batch(len(taken), timeout=0)
        backing_up = threads.submit(pool.backup, tmp_path / "copy")
        assert slow.begun.wait(SOON)
        refused = threads.submit(pool.submit_step, big("more")).exception(SOON)
        slow.go_on.set()
        assert isinstance(refused, DiskFull)
        backing_up.result(SOON)
        assert pool.submit_step(big("more")).accepted == 1


async def test_awaited_calls_are_refused_at_once_too(tmp_path: Path, slow: SlowBackup) -> None:
    with DataPool(tmp_path / "pool", durability="os", files=Unsynced(), quota_mb=0.5) as pool:
        taken, _ = fill(pool)
        pool.fetch_batch(len(taken), timeout=0)
        backing_up = asyncio.create_task(pool.aio.backup(tmp_path / "copy"))
        assert await asyncio.to_thread(slow.begun.wait, SOON)
        try:
            async with asyncio.timeout(SOON):
                with pytest.raises(DiskFull):
                    await pool.aio.submit_step(big("more"))
        finally:
            slow.go_on.set()
        await backing_up
        assert (await pool.aio.submit_step(big("more"))).accepted == 1


def test_a_pool_opens_on_a_full_disk(tmp_path: Path) -> None:
    """Even where it has something to write down: that a tail was cut off."""
    disk = Small(tmp_path, 2 * MB)
    with DataPool(tmp_path / "pool", durability="os", files=disk) as pool:
        pool.submit_step(one("a"))
    with segment(tmp_path / "pool").open("ab") as file:
        file.write(b"\1")
    (tmp_path / "pool" / "reserve").unlink()
    disk.take_the_rest()
    with DataPool(tmp_path / "pool", durability="os", files=disk) as pool:
        assert uids(pool) == ["a"]
        assert [event.kind for event in pool.events()] == ["journal_cut"]
        with pytest.raises(DiskFull):
            pool.submit_step(one("b"))
        check_rules(pool._state)


async def test_it_does_so_for_awaited_calls_too(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", files=Unsynced(), quota_mb=0.5) as pool:
        taken, _ = fill(pool)
        pool.fetch_batch(len(taken), timeout=0)
        receipt = await pool.aio.submit_steps([big("more")])
        assert receipt.accepted == 1
        fill(pool, "x")
        with pytest.raises(DiskFull):
            await pool.aio.submit_steps([big("too much")])


def test_the_bytes_of_a_journal_are_those_of_its_files(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", files=Unsynced(), segment_mb=0.3) as pool:
        for i in range(10):
            pool.submit_step(big(f"s{i}"))
            assert pool.stats()["journal_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("0*"))
        pool.compact()
        pool.submit_step(big("s10"))
        assert pool.stats()["journal_bytes"] == sum(path.stat().st_size for path in tmp_path.glob("0*"))
        size = pool.stats()["journal_bytes"]
    with DataPool(tmp_path, durability="os", files=Unsynced()) as pool:
        assert pool.stats()["journal_bytes"] == size
