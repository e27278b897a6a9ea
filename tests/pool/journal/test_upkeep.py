"""Snapshots, backups, checks, and options that outlive the process."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Unsynced, check_rules, dump, flip, frames, one, same, segment, uids
from tests.pool.kit import Clock

from headrace import DataPool, Step
from headrace.data.errors import InvalidInput
from headrace.pool.errors import DiskFull, JournalDamaged, JournalError, LeaseLost
from headrace.pool.facts import Appended
from headrace.pool.journal.files import Files, snapshot_path
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.repair import backup, repair, verify
from headrace.pool.journaled import LONGEST_RETRY_S, CompactionRetries
from headrace.pool.operations import submit


def opened(folder: Path, **options: Any) -> DataPool:
    return DataPool(folder, durability="os", files=Unsynced(), **options)


def settle(pool: DataPool) -> None:
    """Returns once the compaction is over that the last call may have started."""
    with pool._compacting:
        pass


class Asked:
    """A lock that tells how often it was asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.asked = 0

    def __enter__(self) -> None:
        self.asked += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_compaction_leaves_a_snapshot_and_one_segment(tmp_path: Path) -> None:
    with opened(tmp_path, segment_mb=0.001) as pool:
        for i in range(20):
            pool.submit_step(one(f"s{i}"))
        pool.fetch_batch(15, timeout=0)
        before, size = dump(pool._state), pool.stats()["journal_bytes"]
        pool.compact()
        assert same(before, dump(pool._state))
        assert pool.stats()["journal_bytes"] < size
    assert len(list(tmp_path.glob("*.seg"))) == len(list(tmp_path.glob("*.snap"))) == 1
    with opened(tmp_path) as pool:
        assert same(before, dump(pool._state))


def test_a_snapshot_of_a_snapshot_is_the_same(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.submit_steps([one("a/0", "a", 0, last=False), one("a/0", "a", 1), one("b", quarantined="odd")])
        before = dump(pool._state)
    for _ in range(3):
        with opened(tmp_path) as pool:
            assert same(before, dump(pool._state))
            pool.compact()


def test_a_journal_that_is_mostly_dead_is_compacted_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.pool.journaled.COMPACT_FROM_BYTES", 20_000)
    done = threading.Event()

    class Telling(Unsynced):
        def rename(self, old: Path, new: Path) -> None:
            super().rename(old, new)
            done.set()

    with DataPool(tmp_path, durability="os", files=Telling()) as pool:
        for i in range(200):
            pool.submit_step(one(f"s{i}"))
            pool.fetch_batch(1, timeout=0)
            if done.is_set():
                break
        assert done.wait(120)
    assert list(tmp_path.glob("*.snap"))
    with opened(tmp_path) as pool:
        check_rules(pool._state)
        assert pool.stats()["ledger"]["consumed"] == i + 1


@pytest.mark.parametrize("what", ["tombstones", "metadata", "reasons"])
def test_what_a_snapshot_holds_beside_steps_does_not_have_it_written_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with opened(tmp_path) as pool:
        for n in range(50):
            uid = f"{n}{'x' * 400}"
            if what == "metadata":
                pool.open(uid, metadata={"row": uid})
                continue
            pool.submit_step(one(uid, last=what == "tombstones"))
            if what == "tombstones":
                pool.fetch_batch(1, timeout=0)
            else:
                pool.fail(uid, "r" * 2000)
        monkeypatch.setattr("headrace.pool.journaled.COMPACT_FROM_BYTES", 1000)
        pool._check_at = 0
        for _ in range(5):
            pool.stats()
            settle(pool)
        assert pool._compactions <= 1


def test_a_compaction_that_fails_is_tried_again_after_longer_and_longer_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.0)
    tries: list[float] = []

    def fail(*_: object) -> None:
        tries.append(clock.now)
        raise JournalDamaged("a payload does not match its CRC32C")

    with opened(tmp_path, clock=clock) as pool:
        pool.submit_steps([one(f"s{i}") for i in range(20)])
        pool.fetch_batch(20, timeout=0)
        monkeypatch.setattr("headrace.pool.journaled.COMPACT_FROM_BYTES", 0)
        pool._check_at = 0
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write_snapshot", fail)
            for _ in range(40):
                pool.stats()
                settle(pool)
                clock.forward(1)
        assert tries == [0, 1, 3, 7, 15, 31]
        clock.forward(60)
        pool.stats()
        settle(pool)
        assert pool._compactions == 1


def test_it_is_tried_once_an_hour_at_least_and_soon_again_after_one_that_was_done() -> None:
    retries = CompactionRetries()
    assert retries.due(0.0)
    for _ in range(30):
        retries.failed(100.0, live=1000)
    assert not retries.due(99.0 + LONGEST_RETRY_S)
    assert retries.due(100.0 + LONGEST_RETRY_S)
    retries.succeeded()
    assert retries.due(100.0)
    retries.failed(100.0, live=1000)
    assert not retries.due(100.0)
    assert retries.due(101.0)


@pytest.mark.parametrize("begun", [False, True], ids=["no thread", "no memory to wait for the thread"])
def test_a_compaction_whose_thread_cannot_be_started_is_left_to_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    monkeypatch.setattr("headrace.pool.journaled.COMPACT_FROM_BYTES", 0)
    start, threads = threading.Thread.start, []

    def fail(thread: threading.Thread) -> None:
        threads.append(thread)
        if begun:
            start(thread)
            raise MemoryError
        raise RuntimeError("can't start new thread")

    pool = opened(tmp_path)  # not closed where this fails: it would wait for the compaction
    pool.submit_steps([one(f"s{i}") for i in range(20)])
    pool.fetch_batch(20, timeout=0)
    pool._check_at = 0
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        assert pool.submit_step(one("a")).accepted == 1
    if begun:
        threads[0].join(120)  # whether it compacts or not, nobody compacts beside it
    assert "no thread could be started" in caplog.text
    assert not pool._compacting.locked()
    pool._check_at = 0
    assert pool.submit_step(one("b")).accepted == 1
    pool.close()  # waits for it
    assert pool._compactions
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "b"]


def test_what_was_forgotten_is_in_no_file(tmp_path: Path) -> None:
    secret = b"my name is"
    with opened(tmp_path, channels={"train": {"history_size": 5}}) as pool:
        for uid in ("a", "b"):
            pool.submit_step(one(uid, metadata={"said": f"{uid} {secret.decode()}"}))
        pool.fetch_batch(1, timeout=0, request_id="r")
        assert pool.forget("a")
        assert pool.forget("b")
        assert not any(secret in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


def test_a_name_without_content_is_forgotten_without_rewriting_the_journal(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.open("begun")
        assert pool.forget("begun")
        assert pool._compactions == 0
        pool.open("told", metadata={"said": "my name is"})
        assert pool.forget("told")
        assert pool._compactions == 1


def test_what_need_not_be_erased_at_once_rewrites_nothing(tmp_path: Path) -> None:
    secret = b"my name is"
    with opened(tmp_path) as pool:
        for n in range(20):
            pool.open(f"told {n}", metadata={"said": secret.decode()})
            before = pool.describe()["journal_bytes"]
            assert pool.forget(f"told {n}", erase=False)
            assert pool.describe()["journal_bytes"] - before < 1000
        assert pool._compactions == 0
        assert pool.forget("told 7")  # it is gone; what is left of it in the files goes now
        assert pool._compactions == 1
        assert not any(secret in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


def test_many_that_forget_at_once_share_a_rewriting(tmp_path: Path) -> None:
    """While one rewrites, the others come: the second does it for all of them."""
    callers = 12
    begun, come = threading.Event(), threading.Event()

    class Holding(Unsynced):
        def rename(self, old: Path, new: Path) -> None:
            begun.set()
            assert come.wait(120)
            super().rename(old, new)

    with DataPool(tmp_path, durability="os", files=Holding()) as pool, ThreadPoolExecutor(callers) as threads:
        pool.submit_steps([one(f"s{n}") for n in range(callers)])
        first = threads.submit(pool.forget, "s0")
        assert begun.wait(120)
        others = [threads.submit(pool.forget, f"s{n}") for n in range(1, callers)]
        while pool.stats()["ledger"]["dropped"] < callers:
            time.sleep(0.001)
        come.set()
        assert all(done.result(120) for done in (first, *others))
        assert pool._compactions == 2


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_who_forgets_again_meanwhile_waits_until_the_bytes_are_gone(tmp_path: Path, fails: bool) -> None:
    """Where the first one's rewriting fails, the second does it."""
    secret = b"my name is"
    begun, come = threading.Event(), threading.Event()

    class Holding(Unsynced):
        def rename(self, old: Path, new: Path) -> None:
            if not begun.is_set():
                begun.set()
                assert come.wait(120)
                if fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().rename(old, new)

    def forget() -> bool:
        """Whether nothing of it is in a file once it is forgotten."""
        pool.forget("a")
        return not any(secret in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())

    with DataPool(tmp_path, durability="os", files=Holding()) as pool, ThreadPoolExecutor(2) as threads:
        lock = pool._compacting = Asked()  # type: ignore[assignment]
        pool.submit_step(one("a", metadata={"said": secret.decode()}))
        first = threads.submit(pool.forget, "a")
        assert begun.wait(120)
        second = threads.submit(forget)
        while lock.asked < 2 and not second.done():
            time.sleep(0.001)
        come.set()
        assert second.result(120)
        assert isinstance(first.exception(120), JournalError) == fails


def test_forgetting_again_erases_what_a_failed_compaction_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = b"my name is"

    def full(*_: object) -> None:
        raise DiskFull("no room for a snapshot")

    with opened(tmp_path) as pool:
        pool.submit_step(one("a", metadata={"said": secret.decode()}))
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "write_snapshot", full)
            with pytest.raises(DiskFull):
                pool.forget("a")
        pool.forget("a")
        assert not any(secret in path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


def test_a_step_that_was_taken_alone_can_be_asked_for_again_after_a_snapshot(tmp_path: Path) -> None:
    """Its group is consumed and gone: the answer is all that holds it."""
    with opened(tmp_path) as pool:
        pool.submit_step(one("a", metadata={"n": 1}))
        given = pool.fetch_batch(1, unit="step", timeout=0, request_id="r").steps[0]
        pool.compact()
    with opened(tmp_path) as pool:
        assert pool.fetch_batch(1, unit="step", timeout=0, request_id="r").steps[0] == given


def test_a_lease_named_like_a_request_survives_a_snapshot(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.submit_steps([one("a"), one("b")])
        first = pool.fetch_batch(1, lease_s=1e6, timeout=0)
        pool.fetch_batch(1, timeout=0, request_id=first.lease_id)
        pool.compact()
    with opened(tmp_path) as pool:
        pool.ack(first.lease_id)
        assert pool.stats()["ledger"]["consumed"] == 2


@pytest.mark.parametrize("compacted", [False, True])
def test_a_nack_whose_answer_was_lost_may_be_sent_again_after_a_restart(tmp_path: Path, compacted: bool) -> None:
    clock = Clock()
    with opened(tmp_path, clock=clock) as pool:
        pool.submit_steps([one("a"), one("b")])
        given_back, ran_out = (pool.fetch_batch(1, lease_s=10, timeout=0) for _ in range(2))
        given_back.nack()
        clock.forward(11)
        pool.stats()
        if compacted:
            pool.compact()
        before = dump(pool._state)
    with opened(tmp_path, clock=clock) as pool:
        assert same(before, dump(pool._state))
        pool.nack(given_back.lease_id)
        with pytest.raises(LeaseLost):
            pool.nack(ran_out.lease_id)


@pytest.mark.parametrize("older", [False, True])
def test_what_follows_a_group_that_ends_in_the_middle_of_a_submit_stands_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """As an older release put it, too, whose later facts speak of that group: with another prompt's."""

    def as_before(channel: Any, now: float, heads: Any) -> Appended:
        return Appended(channel.name, now, submit._group_numbers(channel, heads))

    if older:
        monkeypatch.setattr(submit, "_appended", as_before)
    with opened(tmp_path) as pool:
        pool.open("a/0", "a")
        pool.submit_steps([one("a/0", "a", quarantined="odd"), one("a/1", "a"), one("b/0", "b")])
        before = dump(pool._state)
        assert len(pool.list_groups()["items"]) == (1 if older else 2)
    with opened(tmp_path) as pool:
        assert same(before, dump(pool._state))
        check_rules(pool._state)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_group_that_no_longer_takes_trajectories_does_not_after_a_snapshot_either(
    tmp_path: Path, compacted: bool
) -> None:
    """It was out on a lease while another group of its prompt began; that one is consumed, and it came back."""
    with opened(tmp_path) as pool:
        pool.submit_step(one("p/0", "p"))
        lease = pool.fetch_batch(1, lease_s=1e6, timeout=0)
        pool.submit_step(one("p/1", "p"))
        lease.nack()
        assert pool.fetch_batch(1, order="latest", timeout=0).steps[0].trajectory_uid == "p/1"
        if compacted:
            pool.compact()
    with opened(tmp_path) as pool:
        pool.submit_step(one("p/2", "p"))
        assert [row["trajectories"] for row in pool.list_groups()["items"]] == [1, 1]


def test_a_shared_blob_is_there_again_though_only_a_consumer_still_holds_it(tmp_path: Path) -> None:
    """The journal must not take a blob for known because someone still has it in memory."""
    image = b"a large image" * 100
    with opened(tmp_path) as pool:
        pool.submit_step(one("a", multi_modal_data={"image": image}))
        batch = pool.fetch_batch(1, timeout=0)
        pool.compact()
        pool.submit_step(one("b", multi_modal_data={"image": image}))
        assert batch.steps[0].multi_modal_data == {"image": image}
    with opened(tmp_path) as pool:
        assert pool.fetch_batch(1, timeout=0).steps[0].multi_modal_data == {"image": image}


# -- options -----------------------------------------------------------------------------------------------------------


def n_rollouts(pool: DataPool, channel: str = "train") -> int:
    return int(pool.stats(channel)["config"]["n_rollouts"])


@pytest.mark.parametrize("compacted", [False, True])
def test_a_channel_keeps_the_defaults_that_it_began_with(tmp_path: Path, compacted: bool) -> None:
    """A tool that opens the journal without them must not make half a group ready."""
    with opened(tmp_path, defaults={"n_rollouts": 2}) as pool:
        pool.submit_step(one("a/0", "a"))
        if compacted:
            pool.compact()
    with opened(tmp_path) as pool:
        assert n_rollouts(pool) == 2
        assert pool.fetch_batch(1, timeout=0) is None
        assert n_rollouts(pool, "other") == 1


@pytest.mark.parametrize("compacted", [False, True])
def test_defaults_given_anew_reach_channels_that_have_no_options_of_their_own(tmp_path: Path, compacted: bool) -> None:
    with opened(tmp_path, defaults={"n_rollouts": 2}) as pool:
        pool.submit_step(one("a/0", "a"))
        pool.configure("eval", n_rollouts=3)
        if compacted:
            pool.compact()
    with opened(tmp_path, defaults={"n_rollouts": 1}) as pool:
        assert (n_rollouts(pool), n_rollouts(pool, "eval")) == (1, 3)
        assert pool.stats("train")["groups"]["ready"] == 1
    with opened(tmp_path) as pool:
        assert (n_rollouts(pool), n_rollouts(pool, "eval")) == (1, 3)


@pytest.mark.parametrize("option", ["max_queue_size", "group_timeout_s", "tombstones"])
def test_an_option_that_no_journal_could_hold_is_refused_and_the_pool_goes_on(tmp_path: Path, option: str) -> None:
    with opened(tmp_path) as pool:
        with pytest.raises(
            InvalidInput, match=f"{option} must be at most 18446744073709551615, not 18446744073709551616"
        ):
            pool.configure(**{option: 2**64})
        pool.configure(**{option: 2**64 - 1})
        pool.submit_step(one("a"))
    with opened(tmp_path) as pool:
        assert float(pool.stats("train")["config"][option]) == 2.0**64


def test_a_clock_that_goes_back_does_not_make_time_go_back(tmp_path: Path) -> None:
    now = [1000.0]
    with opened(tmp_path, clock=lambda: now[0], defaults={"grace_s": 10.0, "n_rollouts": 1}) as pool:
        pool.submit_step(one("a"))
        now[0] = 1020.0
        assert pool.stats("train")["groups"]["ready"] == 1
        now[0] = 1005.0
        pool.submit_step(one("b"))
        before = dump(pool._state)
    with opened(tmp_path, clock=lambda: now[0]) as pool:
        pool.stats()
        assert same(before, dump(pool._state))


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_says_what_it_found_and_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, segment_mb=0.0001) as pool:
        for uid in "abc":
            pool.submit_step(one(uid))
    found = verify(tmp_path)
    assert (found.commits, found.damage, found.torn) == (3, [], None)
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.glob("0*"))
    with segment(tmp_path, 3).open("ab") as file:
        file.write(b"torn")
    flip(segment(tmp_path, 1), 100)
    before = {path: path.read_bytes() for path in tmp_path.glob("0*")}
    found = verify(tmp_path)
    assert [damage.path.name for damage in found.damage] == ["000000000001.seg"]
    assert found.torn is not None
    assert found.torn[:3] == (segment(tmp_path, 3), segment(tmp_path, 3).stat().st_size - 4, 4)
    assert {path: path.read_bytes() for path in tmp_path.glob("0*")} == before


def test_a_journal_in_use_can_be_verified(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.submit_step(one("a"))
        assert verify(tmp_path).commits == 1
        pool.submit_step(one("b"))
        assert verify(tmp_path).commits == 2


def test_a_sound_journal_is_not_repaired(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        pool.submit_step(one("a"))
    before = {path.name for path in tmp_path.iterdir()}
    assert not repair(tmp_path).damage
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_repaired_journal_can_be_damaged_and_repaired_again(tmp_path: Path) -> None:
    with opened(tmp_path) as pool:
        for uid in "abcd":
            pool.submit_step(one(uid))
    flip(segment(tmp_path), frames(segment(tmp_path))[2][0] + 50)
    repair(tmp_path)
    with opened(tmp_path) as pool:
        pool.submit_step(one("e"))
    flip(snapshot_path(tmp_path, 2), frames(snapshot_path(tmp_path, 2))[-3][0] + 50)
    repair(tmp_path)
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "d", "e"]
        check_rules(pool._state)
    assert len(list((tmp_path / "damaged").iterdir())) == 2


# -- backup ------------------------------------------------------------------------------------------------------------


def test_a_backup_is_a_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", segment_mb=0.001) as pool:
        for i in range(9):
            pool.submit_step(one(f"s{i}"))
        pool.backup(tmp_path / "copy")
        before = dump(pool._state)
        pool.submit_step(one("later"))
    with opened(tmp_path / "copy") as pool:
        assert same(before, dump(pool._state))


def test_an_end_that_is_missing_is_missed_in_a_backup_and_in_what_it_is_made_of(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_step(one("a"))
        pool.submit_step(one("b"))
    backup(tmp_path / "pool", tmp_path / "copy")
    for folder in (tmp_path / "pool", tmp_path / "copy"):
        path = segment(folder)
        path.write_bytes(path.read_bytes()[: frames(path)[1][1]])
        with pytest.raises(JournalDamaged, match="commits 2 to 2 were acknowledged, and are missing at its end"):
            opened(folder)
    with pytest.raises(JournalDamaged, match=r"lacks commits 2 to 2, which were acknowledged.*missing in .*pool"):
        backup(tmp_path / "pool", tmp_path / "another")


def test_a_backup_needs_a_folder_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool, pytest.raises(JournalError, match="is not empty; a backup needs a folder"):
        pool.backup(tmp_path)


def test_a_pool_without_a_journal_has_nothing_to_back_up(tmp_path: Path) -> None:
    with DataPool() as pool, pytest.raises(JournalError, match="no journal"):
        pool.backup(tmp_path)


class Busy(Files):
    """A journal that goes on while it is copied: something happens before each file is copied."""

    def __init__(self, *happenings: Any) -> None:
        self.happenings = list(happenings)

    def append_to(self, path: Path) -> int:
        if self.happenings:
            self.happenings.pop(0)()
        return super().append_to(path)


def test_a_journal_can_be_backed_up_while_it_grows_and_is_compacted(tmp_path: Path) -> None:
    """By another process, which holds no lock: it sees segments come and go."""
    with opened(tmp_path / "pool", segment_mb=0.0005) as pool:
        for i in range(3):
            pool.submit_step(one(f"s{i}"))

        def grow() -> None:
            for _ in range(3):
                pool.submit_step(one(f"s{len(uids(pool))}"))

        backup(tmp_path / "pool", tmp_path / "copy", Busy(grow, pool.compact, grow))
        assert not verify(tmp_path / "copy").damage
        there = uids(pool)
        assert len(there) == 9
    with opened(tmp_path / "copy") as copy:
        assert uids(copy) == there
        check_rules(copy._state)


def test_a_backup_of_a_damaged_journal_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_step(one("a"))
        pool.submit_step(one("b"))
    flip(segment(tmp_path / "pool"), 100)
    with pytest.raises(JournalDamaged, match=r"the backup in .*copy is damaged in 000000000001.seg"):
        backup(tmp_path / "pool", tmp_path / "copy")
    with pytest.raises(JournalError, match="no journal in"):
        backup(tmp_path / "nothing", tmp_path / "copy2")


# -- all that a step can hold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_every_field_of_a_step_is_there_again(tmp_path: Path, compacted: bool) -> None:
    step = Step(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5],
        rollout_log_probs=[-0.5, -0.25],
        trajectory_uid="t",
        prompt_uid="p",
        step_index=0,
        reward=0.5,
        policy_version=3,
        is_last=True,
        metadata={"a": [1, {"b": None}]},
        finish_reason="stop",
        sampling={"temperature": 0.7},
        multi_modal_data={"image": b"bytes"},
        routed_experts=[[1, 2], [3, 300]],
        created_at=12.5,
        call_id="c",
        version_spans=((0, 3), (1, 4)),
        trainable=False,
        quality=0.25,
        tags=("x", "y"),
        note="look",
    )
    with opened(tmp_path) as pool:
        pool.submit_step(step)
        if compacted:
            pool.compact()
    with opened(tmp_path) as pool:
        assert pool.fetch_batch(1, timeout=0).steps == [step]
