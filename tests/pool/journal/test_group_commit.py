"""Many callers at once: who waits for whom, and what one sync is good for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.pool.journal.kit import check_rules, one, uids

from headrace import DataPool
from headrace.pool.journal.files import Files

SOON = 120.0


class Gate(Files):
    """Files whose next sync, once the gate is shut, waits until it is opened; later ones go through."""

    def __init__(self) -> None:
        self.syncs = 0
        self.reached = threading.Event()
        self._shut: threading.Event | None = None
        self._waits: threading.Event | None = None

    def shut(self) -> None:
        self.reached.clear()
        self._shut = self._waits = threading.Event()

    def open_up(self) -> None:
        assert self._waits is not None
        self._waits.set()

    def sync(self, fd: int) -> None:
        self.syncs += 1
        shut, self._shut = self._shut, None
        if shut is not None:
            self.reached.set()
            assert shut.wait(SOON)
        super().sync(fd)


class Asked:
    """A lock that tells when it is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = threading.Semaphore(0)

    def __enter__(self) -> None:
        self._asked.release()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, times: int) -> None:
        for _ in range(times):
            assert self._asked.acquire(timeout=SOON)


@pytest.fixture
def files() -> Gate:
    return Gate()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def sync_lock(pool: DataPool) -> Asked:
    """The lock that callers ask for once their commit is written."""
    assert pool._journal is not None
    lock = pool._journal._sync_lock = Asked()  # type: ignore[assignment]
    return lock


def test_one_sync_serves_all_that_were_written_before_it(
    tmp_path: Path, files: Gate, threads: ThreadPoolExecutor
) -> None:
    with DataPool(tmp_path, files=files) as pool:
        lock, before = sync_lock(pool), files.syncs
        files.shut()
        first = threads.submit(pool.submit_step, one("s0"))
        assert files.reached.wait(SOON)
        others = [threads.submit(pool.submit_step, one(f"s{i}")) for i in range(1, 9)]
        lock.wait(9)
        assert not first.done()
        assert not any(other.done() for other in others)
        files.open_up()
        for submitted in (first, *others):
            assert submitted.result(SOON).accepted == 1
        assert files.syncs - before == 2
    with DataPool(tmp_path) as pool:
        assert sorted(uids(pool)) == [f"s{i}" for i in range(9)]


async def test_calls_of_one_event_loop_share_the_sync_that_has_not_begun(tmp_path: Path, files: Gate) -> None:
    with DataPool(tmp_path, files=files) as pool:
        before = files.syncs
        files.shut()
        first = asyncio.create_task(pool.aio.submit_step(one("s0")))
        assert await asyncio.to_thread(files.reached.wait, SOON)
        others = [asyncio.create_task(pool.aio.submit_step(one(f"s{i}"))) for i in range(1, 9)]
        while pool._journal is not None and pool._journal.serial - 1 < 9:
            await asyncio.sleep(0)
        others[0].cancel()  # who gives up takes nothing from the others
        files.open_up()
        for submitted in (first, *others[1:]):
            assert (await submitted).accepted == 1
        assert others[0].cancelled()
        assert files.syncs - before == 2
    with DataPool(tmp_path) as pool:
        assert sorted(uids(pool)) == [f"s{i}" for i in range(9)]


async def test_where_no_thread_can_be_started_to_sync_calls_are_as_safe_and_later_ones_try_again(
    tmp_path: Path, files: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with DataPool(tmp_path, files=files) as pool:
        before = files.syncs
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            for n in range(2):
                assert (await pool.aio.submit_step(one(f"s{n}"))).accepted == 1
                assert files.syncs == before + n + 1
        for n in range(2, 4):
            assert (await pool.aio.submit_step(one(f"s{n}"))).accepted == 1
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["s0", "s1", "s2", "s3"]


def test_a_call_is_not_answered_before_its_sync_and_what_it_did_is_not_shown_to_others(
    tmp_path: Path, files: Gate, threads: ThreadPoolExecutor
) -> None:
    with DataPool(tmp_path, files=files) as pool:
        lock = sync_lock(pool)
        files.shut()
        submitted = threads.submit(pool.submit_step, one("a"))
        assert files.reached.wait(SOON)
        seen = threads.submit(pool.stats)
        fetched = threads.submit(pool.fetch_batch, 1, timeout=SOON)
        lock.wait(3)
        assert not submitted.done()
        assert not seen.done()
        assert not fetched.done()
        files.open_up()
        assert submitted.result(SOON).accepted == 1
        assert seen.result(SOON)["ledger"]["submitted"] == 1
        assert fetched.result(SOON) is not None


def test_a_segment_is_not_closed_under_a_sync(tmp_path: Path, files: Gate, threads: ThreadPoolExecutor) -> None:
    with DataPool(tmp_path, files=files, segment_mb=0.0005) as pool:
        lock = sync_lock(pool)
        files.shut()
        first = threads.submit(pool.submit_step, one("a"))
        assert files.reached.wait(SOON)
        second = threads.submit(pool.submit_step, one("b"))  # needs a new segment
        lock.wait(2)
        assert not second.done()
        files.open_up()
        assert first.result(SOON).accepted == second.result(SOON).accepted == 1
    assert len(list(tmp_path.glob("*.seg"))) == 2
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "b"]


def test_closing_waits_for_a_sync_and_answers_who_waits(
    tmp_path: Path, files: Gate, threads: ThreadPoolExecutor
) -> None:
    pool = DataPool(tmp_path, files=files)
    lock = sync_lock(pool)
    files.shut()
    first = threads.submit(pool.submit_step, one("a"))
    assert files.reached.wait(SOON)
    second = threads.submit(pool.submit_step, one("b"))
    lock.wait(2)
    closed = threads.submit(pool.close)
    lock.wait(1)
    assert not closed.done()
    files.open_up()
    closed.result(SOON)
    assert first.result(SOON).accepted == second.result(SOON).accepted == 1
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "b"]


def test_writers_go_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """And consumers: what happens meanwhile is in the segment that the snapshot leads into."""

    class Meanwhile(Files):
        def rename(self, old: Path, new: Path) -> None:
            pool.submit_step(one("meanwhile"))
            pool.ack(lease.lease_id)
            super().rename(old, new)
            pool.submit_step(one("later"))

    pool = DataPool(tmp_path, durability="os", files=Meanwhile())
    pool.submit_steps([one("a"), one("b")])
    lease = pool.fetch_batch(1, lease_s=1e6, timeout=0)
    pool.compact()
    check_rules(pool._state)
    ledger = pool.stats()["ledger"]
    pool.close()
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["000000000002.seg", "000000000002.snap"]
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["b", "meanwhile", "later"]
        assert pool.stats()["ledger"] == ledger


def test_eight_writers_two_consumers_and_a_compactor_at_once(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    pool = DataPool(tmp_path, segment_mb=0.005)
    left = threading.Event()

    def write(writer: int) -> None:
        for i in range(25):
            pool.submit_step(one(f"w{writer}/{i}"))

    def consume() -> list[str]:
        taken: list[str] = []
        while not (left.is_set() and pool.stats()["ledger"]["queued"] == 0):
            batch = pool.fetch_batch(1, lease_s=1e6, timeout=0.01)
            if batch is not None:
                batch.ack()
                taken += [step.trajectory_uid for step in batch.steps]
        return taken

    def compact() -> None:
        while not left.is_set():
            pool.compact()

    writers = [threads.submit(write, writer) for writer in range(8)]
    consumers = [threads.submit(consume) for _ in range(2)]
    compactor = threads.submit(compact)
    for done in writers:
        done.result(SOON * 2)
    left.set()
    compactor.result(SOON)
    taken = [uid for consumer in consumers for uid in consumer.result(SOON)]
    assert sorted(taken) == sorted(f"w{writer}/{i}" for writer in range(8) for i in range(25))
    check_rules(pool._state)
    pool.close()
    with DataPool(tmp_path) as pool:
        assert pool.stats()["ledger"]["consumed"] == 200
        check_rules(pool._state)


async def test_a_fetch_that_is_cancelled_while_its_batch_is_written_down_is_answered(tmp_path: Path) -> None:
    files = Gate()
    with DataPool(tmp_path, files=files) as pool:
        pool.submit_step(one("a"))
        files.shut()
        fetching = asyncio.create_task(pool.aio.fetch_batch(1))
        await asyncio.to_thread(files.reached.wait, SOON)
        fetching.cancel()
        await asyncio.sleep(0)
        files.open_up()
        batch = await fetching
        assert batch is not None
        assert [step.trajectory_uid for step in batch.steps] == ["a"]
