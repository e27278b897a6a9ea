"""A disk that fails, a process that is interrupted, two that want the same journal."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pool.journal.kit import Failing, check_rules, flip, frames, one, segment, uids

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.pool.capture import capture
from headrace.pool.errors import DiskFull, JournalDamaged, JournalError, JournalLocked, PoolClosed
from headrace.pool.journal.repair import repair

ROOT = Path(__file__).parents[3]


def failure(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def files() -> Failing:
    return Failing()


# -- syncs and writes --------------------------------------------------------------------------------------------------


def test_a_failed_sync_ends_the_pool_until_it_is_opened_again(tmp_path: Path, files: Failing) -> None:
    pool = DataPool(tmp_path, files=files)
    pool.submit_step(one("a"))
    files.fail["sync"] = failure()
    with pytest.raises(JournalError, match=r"a sync failed \(.*Input/output error\); open the pool again"):
        pool.submit_step(one("b"))
    for call in (lambda: pool.submit_step(one("c")), lambda: pool.fetch_batch(1, timeout=0), pool.stats, pool.compact):
        with pytest.raises(JournalError, match="a sync failed"):
            call()
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) in (["a"], ["a", "b"])
        check_rules(pool._state)
        assert pool.submit_step(one("c")).accepted == 1


async def test_a_failed_sync_reaches_those_who_await(tmp_path: Path, files: Failing) -> None:
    with DataPool(tmp_path, files=files) as pool:
        files.fail["sync"] = failure()
        with pytest.raises(JournalError, match="a sync failed"):
            await pool.aio.submit_step(one("a"))


def test_a_failed_sync_at_the_close_is_said_and_the_lock_let_go(tmp_path: Path, files: Failing) -> None:
    pool = DataPool(tmp_path, durability="os", files=files)
    pool.submit_step(one("a"))
    files.fail["sync"] = failure()
    with pytest.raises(JournalError, match="a sync failed"):
        pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_half_way_is_taken_back(tmp_path: Path, files: Failing, number: int) -> None:
    with DataPool(tmp_path, files=files) as pool:
        pool.submit_step(one("a"))
        files.fail |= {"write_half": failure(number), "rename": failure()}  # a compaction makes no room either
        with pytest.raises(DiskFull if number == errno.ENOSPC else JournalError, match=os.strerror(number)):
            pool.submit_step(one("b"))
        assert uids(pool) == ["a"]
        files.fail.clear()
        assert pool.submit_step(one("c")).accepted == 1
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "c"]
        assert pool.events() == []


def test_a_write_that_cannot_be_taken_back_ends_the_pool(tmp_path: Path, files: Failing) -> None:
    pool = DataPool(tmp_path, files=files)
    pool.submit_step(one("a"))
    files.fail |= {"write_half": failure(errno.ENOSPC), "truncate": failure()}
    with pytest.raises(DiskFull):
        pool.submit_step(one("b"))
    with pytest.raises(JournalError, match=r"a write failed .* and could not be taken back .*; open the pool again"):
        pool.submit_step(one("c"))
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a"]
        assert [event.kind for event in pool.events()] == ["journal_cut"]


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "sync_dir"])
def test_a_snapshot_that_fails_leaves_the_segments_and_the_pool(tmp_path: Path, files: Failing, call: str) -> None:
    with DataPool(tmp_path, durability="os", files=files) as pool:
        pool.submit_step(one("a"))
        assert pool._journal is not None
        number = pool._journal.rotate()
        files.fail[call] = failure()
        with pytest.raises(JournalError, match=r"no snapshot in .*, the segments are untouched: .*Input/output error"):
            pool._journal.write_snapshot(number, pool._journal.serial, capture(pool._state, 0.0))
        assert not list(tmp_path.glob("*.tmp"))
        pool.submit_step(one("b"))
        pool.compact()
        pool.submit_step(one("c"))
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "b", "c"]


def test_a_rotation_that_fails_leaves_the_segment_in_use(tmp_path: Path, files: Failing) -> None:
    with DataPool(tmp_path, files=files) as pool:
        pool.submit_step(one("a"))
        files.fail["create"] = failure()
        with pytest.raises(JournalError, match="no new segment"):
            pool.compact()
        pool.submit_step(one("b"))
    assert not segment(tmp_path, 2).exists()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "b"]


def test_an_interrupt_in_the_middle_of_a_commit_ends_the_pool_and_nothing_is_half_there(
    tmp_path: Path, files: Failing
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    pool = DataPool(tmp_path, files=files)
    pool.submit_step(one("a"))
    files.before["write"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        pool.submit_step(one("b"))
    with pytest.raises(PoolClosed, match=r"KeyboardInterrupt.*open the pool again"):
        pool.submit_step(one("c"))
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a"]
        check_rules(pool._state)


def test_a_disk_that_cannot_be_read_is_an_error_and_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DataPool(tmp_path).close()

    def fail(*_: object) -> bytes:
        raise failure()

    with monkeypatch.context() as broken:
        broken.setattr("headrace.pool.journal.records.os.preadv", fail)
        with pytest.raises(JournalError, match=r"cannot be read: .*Input/output error") as raised:
            DataPool(tmp_path)
    assert not isinstance(raised.value, JournalDamaged)
    assert not (tmp_path / "saved").exists()
    DataPool(tmp_path).close()


def test_what_could_not_be_saved_around_damage_is_said(tmp_path: Path, files: Failing) -> None:
    with DataPool(tmp_path) as pool:
        pool.submit_step(one("a"))
        pool.submit_step(one("b"))
    flip(segment(tmp_path), frames(segment(tmp_path))[1][0] + 50)
    files.fail["create"] = failure(errno.ENOSPC)
    with pytest.raises(JournalDamaged, match=r"what lies around it could not be copied .*No space left"):
        DataPool(tmp_path, files=files)


# -- one process -------------------------------------------------------------------------------------------------------


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that has the journal open until its standard input ends."""
    script = "import sys; from headrace import DataPool; pool = DataPool(sys.argv[1])\n"
    script += "print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("below", ["", "journal"])
def test_a_file_in_a_journals_place_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(JournalError, match=f"{file / below} cannot hold a journal: {file} is a file"):
        DataPool(file / below)


def test_a_second_process_is_refused_with_the_first_ones_id(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        for attempt in (DataPool, repair):
            with pytest.raises(JournalLocked, match=f"{tmp_path} is open in process {other.pid}; "):
                attempt(tmp_path)
        assert other.stdin is not None
        other.stdin.close()
    DataPool(tmp_path).close()


def test_the_journal_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    with holder(tmp_path) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    DataPool(tmp_path).close()


def test_a_second_pool_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with DataPool(tmp_path), pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        DataPool(tmp_path)
    DataPool(tmp_path).close()


def in_a_child(work: object) -> str:
    """What a forked child says."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, str(work()).encode())  # type: ignore[operator]
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as said:
        answer = said.read()
    os.waitpid(child, 0)
    return answer


def test_a_forked_child_can_neither_write_to_the_journal_nor_unlock_it(tmp_path: Path) -> None:
    pool = DataPool(tmp_path, durability="os")
    pool.submit_step(one("a"))

    def child() -> str:
        try:
            pool.submit_step(one("b"))
        except JournalError as error:
            pool.close()
            return str(error)
        return "it was let through"

    said = in_a_child(child)
    assert f"belongs to process {os.getpid()}, which this one was forked from; connect to that pool instead" in said
    with pytest.raises(JournalLocked):
        DataPool(tmp_path)
    pool.submit_step(one("c"))
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a", "c"]


def test_a_child_that_outlives_the_pool_does_not_keep_it_locked(tmp_path: Path) -> None:
    pool = DataPool(tmp_path)
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(into)
        os.read(out, 1)  # until the parent is done
        os._exit(0)
    os.close(out)
    pool.close()
    DataPool(tmp_path).close()
    os.close(into)
    os.waitpid(child, 0)


# -- what is left open -------------------------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_open_whatever_ended_the_pool(tmp_path: Path) -> None:
    with DataPool(tmp_path / "damaged") as pool:
        pool.submit_step(one("a"))
        pool.submit_step(one("b"))
    flip(segment(tmp_path / "damaged"), frames(segment(tmp_path / "damaged"))[1][0] + 50)
    before = open_descriptors()
    for _ in range(3):
        with DataPool(tmp_path / "sound", segment_mb=0.001) as pool:
            for i in range(9):
                pool.submit_step(one(f"s{i}"))
            pool.compact()
            pool.backup(tmp_path / f"backup-{len(list(tmp_path.iterdir()))}")
            with pytest.raises(JournalLocked):
                DataPool(tmp_path / "sound")
        with pytest.raises(JournalDamaged):
            DataPool(tmp_path / "damaged")
        with pytest.raises(InvalidInput):
            DataPool(tmp_path / "sound", channels={"train": {"n_rollouts": 0}})
    assert open_descriptors() == before
    with DataPool(tmp_path / "sound") as pool:
        assert pool.stats()["balanced"]


def test_a_pool_that_could_not_apply_a_fact_can_be_closed_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DataPool(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("headrace.pool.journaled.apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pool.submit_step(one("a"))
    with pytest.raises(PoolClosed, match=r"could not be applied.*open the pool again"):
        pool.stats()
    pool.close()
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a"]


def test_a_commit_that_cannot_be_applied_in_recovery_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataPool(tmp_path) as pool:
        pool.submit_step(one("a"))
    with monkeypatch.context() as broken:
        broken.setattr("headrace.pool.journaled.apply", lambda *_: 1 / 0)
        with pytest.raises(JournalError, match=r"commit 1 reads back, but cannot be applied .*ZeroDivisionError"):
            DataPool(tmp_path)
    with DataPool(tmp_path) as pool:
        assert uids(pool) == ["a"]
