"""A snapshot is taken in slices: whatever happens between any two of them, it is the state as it was when it began."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from tests.pool.journal.kit import Unsynced, check_rules, dump, one, same, uids
from tests.pool.journal.power import Disk, PowerFailure
from tests.pool.journal.test_state_machine import CHECKS, Machine
from tests.pool.scored.kit import joined, post, started

from headrace import DataPool
from headrace.pool import capture as captures
from headrace.pool.capture import Capture
from headrace.pool.journaled import CAPTURES_IN_SLICES

Told = list[tuple[str, Any]]


def budget(n: int) -> Callable[[], bool]:
    """Time for so many looks at the clock."""
    left = iter(range(n))
    return lambda: next(left, None) is not None


class Sliced(DataPool):
    """A pool whose snapshots are taken a group at a time; `between` is called after each slice, with the lock free."""

    between: Callable[[int], None] = staticmethod(lambda _: None)
    slices = 0
    begun = 0
    at_once = 0

    def _take_slices(self, capture: Capture, *, at_once: bool) -> bool:
        self.begun += 1
        self.at_once += at_once
        self.slices = 0
        while not capture.spoiled:
            with self._lock:
                if capture.take(lambda: at_once):
                    return True
            self.slices += 1
            self.between(self.slices)
        return False


def opened(folder: Path, **options: Any) -> Sliced:
    channels = {"train": {"history_size": 2, "grace_s": 5.0, "n_rollouts": 2}, "steps": {}, "eval": {"tombstones": 3}}
    return Sliced(folder, durability="os", files=Unsynced(), channels=channels, clock=lambda: NOW[0], **options)


def opened_again(folder: Path) -> DataPool:
    return DataPool(folder, durability="os", files=Unsynced(), clock=lambda: NOW[0])


NOW = [1000.0]


def filled(folder: Path) -> Sliced:
    """A pool with a little of everything."""
    NOW[0] = 1000.0
    pool = opened(folder)
    for prompt in range(9):
        pool.submit_steps([one(f"{prompt}/{r}", f"p{prompt}", i, last=i == 1) for r in range(2) for i in range(2)])
    pool.open("announced", "p9", metadata={"row": 1})
    pool.submit_step(one("running", "p10", last=False, multi_modal_data={"image": b"cat" * 40}))
    NOW[0] += 6.0
    for uid in ("s0", "s1", "s2", "s3"):
        pool.submit_steps([one(uid, index=i, last=i == 1) for i in range(2)], "steps")
    for uid in ("e0", "e1", "e2", "e3", "e4"):
        pool.submit_step(one(uid), "eval")
    pool.fetch_batch(2, timeout=0, request_id="first/1")
    pool.fetch_batch(1, timeout=0, lease_s=50, request_id="first/2")
    pool.fetch_batch(2, timeout=0, lease_s=60)
    pool.fetch_batch(2, channel="steps", unit="step", timeout=0, lease_s=70, request_id="s/1")
    pool.fetch_batch(1, channel="steps", unit="step", timeout=0)
    pool.fetch_batch(2, channel="eval", timeout=0, request_id="e/1")
    pool.fail("e4", "it broke", "eval")
    pool.submit_steps([one("graced", "p20", last=True)])
    started(pool)
    for name in range(5):
        post(pool, name)
    pool.desk_batch("trainer/1", lease_s=40.0)
    return pool


def lease(pool: DataPool, channel: str = "train") -> str:
    return next(iter(pool._state.channels[channel].leases))


def later(pool: DataPool, seconds: float) -> None:
    NOW[0] += seconds
    pool.stats()


OPERATIONS: dict[str, Callable[[DataPool], Any]] = {
    "submit to a group that is there": lambda p: p.submit_step(one("running", "p10", 1, last=True)),
    "submit of a new one": lambda p: p.submit_steps([one("new", "p10"), one("newer")]),
    "submit that is late": lambda p: p.submit_step(one("0/0", "p0", 5)),
    "submit to a new channel": lambda p: p.submit_step(one("new"), "other"),
    "duplicate that brings a reward": lambda p: p.submit_step(one("8/0", "p8", 0, last=False, reward=2.0)),
    "open": lambda p: p.open("announced", "p10", metadata={"row": 2}),
    "open of a new one": lambda p: p.open("unheard", "p8"),
    "reward": lambda p: p.reward("8/1", 1.0, source="person"),
    "rewards of steps": lambda p: p.reward_steps("8/1", {0: 1.0, 1: 0.5}),
    "complete": lambda p: p.complete("running", 1.0),
    "fail": lambda p: p.fail("8/0", "it broke"),
    "fail of what is out step by step": lambda p: p.fail("s0", "it broke", "steps", quarantine=True),
    "fetch": lambda p: p.fetch_batch(3, timeout=0),
    "fetch with surplus": lambda p: p.fetch_batch(4, 1, timeout=0, lease_s=40),
    "fetch that answers": lambda p: [p.fetch_batch(1, timeout=0, request_id=f"first/{i}") for i in range(3, 8)],
    "replay": lambda p: p.fetch_batch(2, order="mixed", timeout=0, lease_s=30),
    "steps": lambda p: p.fetch_batch(3, channel="steps", unit="step", timeout=0),
    "ack": lambda p: p.ack(lease(p)),
    "nack": lambda p: p.nack(lease(p)),
    "nack of steps": lambda p: p.nack(lease(p, "steps"), "steps"),
    "ack of steps": lambda p: p.ack(lease(p, "steps"), "steps"),
    "extend": lambda p: p.extend(lease(p), 500.0),
    "curate": lambda p: p.curate("8/0", 0, tags=["good"]),
    "forget": lambda p: p.forget("8/0", erase=False),
    "forget of the history": lambda p: p.forget("0/0", erase=False),
    "forget of what is leased": lambda p: p.forget("3/0", erase=False),
    "version": lambda p: p.set_version(3),
    "shutdown": lambda p: p.shutdown("eval"),
    "options": lambda p: p.configure("train", n_rollouts=1, require_reward=True),
    "the same options": lambda p: p.configure("train", n_rollouts=2),
    "a grace ends": lambda p: later(p, 6.0),
    "leases run out": lambda p: later(p, 100.0),
    "nobody asks for an answer again": lambda p: later(p, 600.0),
    "a scored group": lambda p: post(p, 20, sequences=3),
    "a batch of scored groups": lambda p: p.desk_ack(p.desk_batch("trainer/2").lease),
    "an environment": joined,
    "nothing of scored groups stays": lambda p: p.desk_reset(),
    "tombstones go": lambda p: p.fetch_batch(2, channel="eval", timeout=0),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("apart", [10, pytest.param(1, marks=pytest.mark.long)])
def test_an_operation_between_any_two_slices_gives_the_same_state(tmp_path: Path, name: str, apart: int) -> None:
    at, slices = 1, 1
    while at <= slices:
        folder = tmp_path / str(at)
        pool = filled(folder)

        def once(number: int, pool: Sliced = pool, at: int = at) -> None:
            if number == at and pool.begun == 1:
                OPERATIONS[name](pool)

        pool.between = once
        pool.compact()
        slices = max(slices, pool.slices)
        pool.stats()
        before = dump(pool._state)
        check_rules(pool._state)
        pool.close()
        with opened_again(folder) as again:
            again.stats()
            assert same(before, dump(again._state))
            check_rules(again._state)
        at += apart if at > 4 else 1
    assert slices > 10


def test_a_capture_that_calls_keep_spoiling_is_taken_at_once_in_the_end(tmp_path: Path) -> None:
    pool = filled(tmp_path / "pool")
    options = iter(range(3, 1000))
    pool.between = lambda _: pool.configure("train", n_rollouts=next(options))
    pool.compact()
    assert (pool.begun, pool.at_once) == (CAPTURES_IN_SLICES + 1, 1)
    before = dump(pool._state)
    pool.close()
    with opened_again(tmp_path / "pool") as again:
        assert same(before, dump(again._state))


def test_a_channel_that_nothing_touches_costs_its_groups_and_no_more(tmp_path: Path) -> None:
    """Numbers of groups that are gone are passed over once, not by every snapshot."""
    pool = Sliced(tmp_path / "pool", durability="os", files=Unsynced())
    for number in range(3 * captures.PASSED_OVER_AT_ONCE):
        pool.submit_step(one(f"t{number}"))
    assert pool.fetch_batch(3 * captures.PASSED_OVER_AT_ONCE - 1, timeout=0) is not None
    pool.compact()
    first = pool.slices
    pool.compact()
    assert pool.slices < first
    assert pool._state.channels["train"].first_seq == 3 * captures.PASSED_OVER_AT_ONCE - 1
    pool.close()


# -- random calls between slices ---------------------------------------------------------------------------------------


class SlicedMachine(Machine):
    """Random calls, with a snapshot under way for many of them."""

    capture: Capture | None = None

    def drop_capture(self) -> None:
        if self.capture is not None:
            self.capture.end()
            self.capture = None

    @precondition(lambda self: self.capture is None)
    @rule()
    def begin_a_snapshot(self) -> None:
        journal = self.pool._journal
        assert journal is not None
        self.settled()
        number = journal.number if journal.empty else journal.rotate(spare=True)
        self.place = number, journal.serial
        self.capture = Capture.begin(self.pool._state, self.now)

    @precondition(lambda self: self.capture is not None)
    @rule(groups=st.integers(0, 3))
    def take_a_slice(self, groups: int) -> None:
        assert self.capture is not None
        done = self.capture.take(budget(groups))
        if self.capture.spoiled:
            self.drop_capture()
        elif done:
            records = list(self.capture.records())
            self.drop_capture()
            assert self.pool._journal is not None
            self.pool._journal.write_snapshot(*self.place, records)
            super().end_and_begin_again(cleanly=False)

    def compact(self) -> None:
        self.drop_capture()
        super().compact()

    def forget(self, channel: str, prompt: int, rollout: int) -> None:
        self.drop_capture()
        super().forget(channel, prompt, rollout)

    def end_and_begin_again(self, cleanly: bool) -> None:
        self.drop_capture()
        super().end_and_begin_again(cleanly)

    def teardown(self) -> None:
        self.drop_capture()
        super().teardown()


@pytest.mark.parametrize("stories", [10, pytest.param(300, marks=pytest.mark.long)])
def test_whatever_happens_between_slices_a_snapshot_is_the_state_as_it_was(stories: int) -> None:
    told = settings(settings(), max_examples=stories, stateful_step_count=50, suppress_health_check=CHECKS)
    run_state_machine_as_test(SlicedMachine, settings=told)


# -- the power fails ---------------------------------------------------------------------------------------------------


def compacting_work(disk: Disk, told: Told) -> None:
    """Submits and fetches between the slices of a compaction; what was acknowledged is told."""
    pool = Sliced(disk.root / "pool", files=disk, segment_mb=0.002)
    for number in range(6):
        pool.submit_step(one(f"a{number}"))
        told.append(("kept", f"a{number}"))

    def between(number: int) -> None:
        if number % 2:
            pool.submit_step(one(f"b{number}"))
            told.append(("kept", f"b{number}"))
        elif batch := pool.fetch_batch(1, timeout=0):
            told.append(("consumed", batch.groups[0].trajectories[0].uid))

    pool.between = between
    pool.compact()
    pool.submit_step(one("c"))
    told.append(("kept", "c"))
    pool.close()


def failures(tmp_path: Path) -> Iterator[tuple[Disk, Told]]:
    """The disk and what was told, for a failure of the power at each operation."""
    (tmp_path / "whole").mkdir()
    whole = Disk(tmp_path / "whole")
    compacting_work(whole, [])
    for at in range(1, whole.operations + 1):
        root = tmp_path / str(at)
        root.mkdir()
        disk, told = Disk(root, fail_at=at), Told()
        with pytest.raises(PowerFailure):
            compacting_work(disk, told)
        disk.kill()
        yield disk, told


def test_a_power_failure_at_any_point_of_a_compaction_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    seen = 0
    for disk, told in failures(tmp_path):
        for outcome in range(2):
            seen += 1
            after = tmp_path / "after"
            disk.after_a_power_failure(after, random.Random(seen) if outcome else None)
            with DataPool(after / "pool") as pool:
                check_rules(pool._state)
                there, tombs = set(uids(pool)), set(pool._state.look("train").tombstones)
            assert {uid for _, uid in told} <= there | tombs
            assert {uid for what, uid in told if what == "consumed"} <= tombs
    assert seen > 100
