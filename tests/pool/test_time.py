"""What the clock does to a channel, told by a clock that moves only when it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pool.kit import (
    Clock,
    answer,
    check_conservation,
    drain,
    events,
    fetched,
    group,
    keys,
    ledger,
    prompts,
    step,
    trajectory,
)
from tests.pool.scored.kit import post, scored_stats, started

from headrace import DataPool, Step
from headrace.pool.errors import LeaseLost


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Iterator[DataPool]:
    with DataPool(clock=clock) as pool:
        yield pool
        check_conservation(pool)


def call(uid: str, turn: int, **fields: Any) -> Step:
    return step(uid, None, response_ids=answer(uid, turn), call_id=f"call-{turn}", **fields)


# -- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_lasts_as_long_as_it_was_asked_for(pool: DataPool, clock: Clock) -> None:
    pool.submit_steps([*group("a"), *group("b")])
    batch = fetched(pool, lease_s=10)
    assert batch.deadline == clock.now + 10
    clock.forward(9.999)
    assert pool.fetch_batch(2, timeout=0) is None
    clock.forward(0.001)
    assert prompts(fetched(pool, 2)) == ["a", "b"]
    with pytest.raises(LeaseLost):
        batch.ack()


def test_an_ack_after_the_deadline_is_refused_though_nobody_else_asked(pool: DataPool, clock: Clock) -> None:
    pool.submit_steps(group("a"))
    batch = fetched(pool, lease_s=10)
    clock.forward(10)
    with pytest.raises(LeaseLost):
        batch.ack()
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_an_extended_lease_outlives_its_first_deadline(pool: DataPool, clock: Clock) -> None:
    pool.submit_steps(group("a"))
    batch = fetched(pool, lease_s=10)
    clock.forward(9)
    assert batch.extend(10) == clock.now + 10
    clock.forward(9)
    assert ledger(pool) == {"submitted": 1, "leased": 1}
    batch.ack()
    assert ledger(pool) == {"submitted": 1, "consumed": 1}


def test_deliveries_are_counted_over_many_losses(pool: DataPool, clock: Clock) -> None:
    pool.submit_steps(group("a"))
    for expected in (1, 2, 3, 4):
        assert fetched(pool, lease_s=1).groups[0].deliveries == expected
        clock.forward(1)


# -- answers that are lost ---------------------------------------------------------------------------------------------


def asked(pool: DataPool, request: str) -> list[str]:
    """What a request is given, or given again."""
    return prompts(pool.fetch_batch(1, timeout=0, request_id=request))


def test_an_answer_can_be_asked_for_again_for_a_minute_and_a_half_the_newest_for_ten(
    pool: DataPool, clock: Clock
) -> None:
    pool.configure(replies_kept=1)
    pool.submit_steps([one for name in "abcdef" for one in group(name)])
    for request, name in (("u/1", "a"), ("u/2", "b"), ("v/1", "c")):
        assert asked(pool, request) == [name]
    clock.forward(89)
    assert [asked(pool, request) for request in ("u/1", "u/2", "v/1")] == [["a"], ["b"], ["c"]]
    clock.forward(1)
    assert [asked(pool, request) for request in ("u/2", "v/1")] == [["b"], ["c"]], "each consumer has its newest"
    assert asked(pool, "u/1") == ["d"]
    clock.forward(509)
    assert asked(pool, "v/1") == ["c"]
    clock.forward(1)
    assert asked(pool, "v/1") == ["e"]


def test_an_answer_under_a_lease_can_be_asked_for_again_for_as_long_as_that_lasts(pool: DataPool, clock: Clock) -> None:
    pool.submit_steps([*group("a"), *group("b")])
    first = fetched(pool, request_id="r", lease_s=1000)
    clock.forward(999)
    assert fetched(pool, request_id="r").lease_id == first.lease_id
    clock.forward(1)
    assert fetched(pool, request_id="r").groups[0].deliveries == 2


# -- groups that take too long ----------------------------------------------------------------------------------------


def test_an_incomplete_group_without_news_is_dropped(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10, n_rollouts=2)
    pool.submit_steps([*group("p", 1), step("p/1", 0, "p")])
    clock.forward(9)
    pool.submit_step(step("p/1", 1, "p"))
    clock.forward(9)
    assert ledger(pool) == {"submitted": 3, "queued": 3}
    clock.forward(1)
    assert ledger(pool) == {"submitted": 3, "timeout": 3}
    assert events(pool, "drop") == [{"group": "p", "steps": 3, "reason": "timeout"}]
    assert pool.submit_step(step("p/1", 2, "p", last=True)).late == 1


def test_a_reward_is_news(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10)
    pool.submit_step(step("t"))
    clock.forward(9)
    pool.reward("t", 1.0)
    clock.forward(9)
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_a_ready_group_does_not_time_out(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10)
    pool.submit_steps(group("p"))
    clock.forward(1000)
    assert drain(pool) == ["p"]


def test_a_group_that_waits_for_its_reward_times_out(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10, require_reward=True)
    pool.submit_steps(group("p"))
    clock.forward(10)
    assert ledger(pool) == {"submitted": 1, "timeout": 1}


def test_a_trajectory_that_nobody_ends_times_out_with_its_group(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10)
    pool.open("t", "p")
    clock.forward(10)
    assert pool.stats("train")["trajectories"] == 0
    assert pool.complete("t").status == "late"


def test_a_partial_group_is_served_with_what_is_complete(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10, n_rollouts=4, on_timeout="partial")
    pool.submit_steps([*group("p", 2), step("p/2", 0, "p", policy_version=0)])
    clock.forward(10)
    (found,) = fetched(pool, lease_s=5).groups
    assert (found.partial, [one.uid for one in found.trajectories]) == (True, ["p/0", "p/1"])
    clock.forward(5)
    assert fetched(pool).groups[0].deliveries == 2
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "timeout": 1}
    assert pool.submit_step(step("p/2", 1, "p")).late == 1
    assert pool.submit_steps(trajectory("p/3", 1, "p")).late == 1


def test_a_partial_group_with_nothing_complete_is_dropped(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10, on_timeout="partial")
    pool.submit_step(step("t"))
    clock.forward(10)
    assert ledger(pool) == {"submitted": 1, "timeout": 1}


def test_a_leased_group_does_not_time_out_but_one_that_came_back_incomplete_does(pool: DataPool, clock: Clock) -> None:
    pool.configure(group_timeout_s=10, n_rollouts=2)
    pool.submit_steps(group("p", 1))
    batch = fetched(pool, n_rollouts=1, lease_s=600)
    clock.forward(100)
    assert ledger(pool) == {"submitted": 1, "leased": 1}
    batch.nack()
    assert ledger(pool) == {"submitted": 1, "timeout": 1}


def test_a_timeout_given_later_counts_from_the_last_news(pool: DataPool, clock: Clock) -> None:
    pool.submit_step(step("old"))
    clock.forward(20)
    pool.submit_step(step("new"))
    pool.configure(group_timeout_s=10)
    assert [event["group"] for event in events(pool, "drop")] == ["old"]
    pool.configure(group_timeout_s=None)
    clock.forward(1000)
    assert ledger(pool) == {"submitted": 2, "queued": 1, "timeout": 1}


@pytest.mark.parametrize("end", ["ack", "nack"])
def test_a_group_whose_single_steps_were_out_times_out_like_any_other(pool: DataPool, clock: Clock, end: str) -> None:
    pool.configure(group_timeout_s=10)
    pool.submit_steps([step("t", 0), step("t", 1)])
    batch = fetched(pool, unit="step", lease_s=600)
    clock.forward(100)
    getattr(batch, end)()
    assert ledger(pool)["timeout"] == (1 if end == "ack" else 2)
    assert pool.stats("train")["groups"]["queued"] == 0


# -- the grace after an end -------------------------------------------------------------------------------------------


def test_within_the_grace_a_group_is_not_ready(pool: DataPool, clock: Clock) -> None:
    pool.configure(grace_s=5)
    pool.submit_step(call("t", 0))
    pool.complete("t")
    clock.forward(4)
    assert pool.fetch_batch(1, timeout=0) is None
    assert pool.submit_step(call("t", 1)).indices == (1,)
    clock.forward(4)
    assert pool.fetch_batch(1, timeout=0) is None
    clock.forward(1)
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1)]


def test_after_the_grace_a_call_is_late(pool: DataPool, clock: Clock) -> None:
    pool.configure(grace_s=5)
    pool.submit_step(call("t", 0))
    pool.complete("t")
    clock.forward(5)
    assert pool.submit_step(call("t", 1)).late == 1
    assert keys(fetched(pool).steps) == [("t", 0)]


def test_a_trajectory_that_fills_up_after_its_end_still_has_its_grace(pool: DataPool, clock: Clock) -> None:
    pool.configure(grace_s=5)
    pool.submit_step(step("t", 1, last=True))
    clock.forward(1)
    pool.submit_step(step("t", 0))
    assert pool.fetch_batch(1, timeout=0) is None
    clock.forward(4)
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1)]


def test_a_missing_step_may_come_after_the_grace(pool: DataPool, clock: Clock) -> None:
    pool.configure(grace_s=5)
    pool.submit_step(step("t", 1, last=True))
    clock.forward(100)
    pool.submit_step(step("t", 0))
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1)]


def test_graces_of_what_agents_complete_hold_no_environments_groups_back(pool: DataPool, clock: Clock) -> None:
    pool.configure(grace_s=10)
    pool.desk_serve("train")
    for name in range(3):
        post(pool, name)
    pool.submit_steps(group("a"))
    for _ in range(2):
        assert pool.fetch_batch(2, timeout=0) is None
        assert scored_stats(pool)["moved"] == 2, "what was brought for one fetch is on its way for the next"
    clock.forward(6)
    pool.submit_steps(group("b"))
    clock.forward(4)
    assert prompts(pool.fetch_batch(3, timeout=0)) == ["a", "desk/0", "desk/1"]


def test_a_reward_that_comes_when_the_clock_was_set_back_counts(pool: DataPool, clock: Clock) -> None:
    pool.configure(require_reward=True)
    pool.submit_steps(group("p"))
    clock.forward(-100)
    pool.reward("p/0", 1.0)
    assert drain(pool) == ["p"]


@pytest.mark.parametrize("seconds", [0, 3, 6, 100])
def test_a_recovered_channel_is_where_the_clock_left_it(tmp_path: Path, clock: Clock, seconds: float) -> None:
    """The end of a grace is written nowhere: a recovery must come to the same, whoever looked when."""
    pool = DataPool(tmp_path, clock=clock, durability="os")
    pool.configure(grace_s=5, n_rollouts=2, group_timeout_s=50, on_timeout="partial")
    pool.submit_steps([*group("p", 1), step("p/1", 0, "p"), *group("q", 2)])
    clock.forward(seconds)
    pool.stats()
    before = (ledger(pool), pool.list_groups(), [keys(one.steps) for one in _trajectories(pool)])
    pool.close()
    with DataPool(tmp_path, clock=clock, durability="os") as again:
        assert (ledger(again), again.list_groups(), [keys(one.steps) for one in _trajectories(again)]) == before


def _trajectories(pool: DataPool) -> list[Any]:
    return [pool.trajectory(row["trajectory_uid"]) for row in pool.list_trajectories()["items"]]


# -- late trajectories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_s", "late_for_s"), [(30.0, 30.0), (None, 600.0)])
def test_a_rollout_that_never_came_costs_its_prompt_no_later_epoch(
    pool: DataPool, clock: Clock, timeout_s: float | None, late_for_s: float
) -> None:
    pool.configure("train", n_rollouts=3, group_timeout_s=timeout_s)
    for prompt in ("p", "q"):  # each is handed out before its third trajectory
        pool.submit_steps(group(prompt, 2))
        assert prompts(fetched(pool, n_rollouts=2)) == [prompt]
    clock.forward(late_for_s - 1)
    assert pool.submit_step(step("p/2", 0, "p", last=True)).late == 1
    clock.forward(1)
    assert pool.submit_step(step("q/2", 0, "q", last=True)).late == 0


# -- a clock that is set ----------------------------------------------------------------------------------------------


class Clocks:
    """A wall clock that can be set, and one that goes on as time passes."""

    def __init__(self) -> None:
        self.wall, self.monotonic = Clock(1_000_000.0), Clock(50.0)

    def opened(self, **options: Any) -> DataPool:
        return DataPool(clock=self.wall, monotonic=self.monotonic, **options)

    def restarted(self) -> None:
        """A monotonic clock begins anew with the machine."""
        self.monotonic.now = 5.0

    def forward(self, seconds: float) -> None:
        self.wall.forward(seconds)
        self.monotonic.forward(seconds)


@pytest.mark.parametrize("by", [7200.0, -7200.0])
def test_a_clock_that_is_set_ends_no_lease_and_drops_no_group(by: float) -> None:
    clocks = Clocks()
    with clocks.opened(channels={"train": {"group_timeout_s": 30, "n_rollouts": 2}}) as pool:
        pool.submit_steps(group("a", 2))
        batch = fetched(pool, lease_s=10)
        pool.submit_steps(group("b", 1))
        clocks.forward(2)
        clocks.wall.forward(by)
        assert ledger(pool) == {"submitted": 3, "leased": 2, "queued": 1}
        clocks.forward(7)
        batch.extend(10)
        clocks.forward(9)
        assert ledger(pool) == {"submitted": 3, "leased": 2, "queued": 1}
        clocks.forward(2)
        assert ledger(pool) == {"submitted": 3, "queued": 3}
        clocks.forward(10)
        assert ledger(pool) == {"submitted": 3, "queued": 2, "timeout": 1}
        if by > 0:
            assert pool.events()[-1].at == clocks.wall.now


def test_a_clock_that_is_set_back_and_forward_again_moves_nothing() -> None:
    clocks = Clocks()
    with clocks.opened() as pool:
        pool.submit_steps(group("a"))
        batch = fetched(pool, lease_s=10)
        for by in (-7200.0, 7200.0):
            clocks.forward(1)
            clocks.wall.forward(by)
            assert ledger(pool) == {"submitted": 1, "leased": 1}
        assert batch.extend(10) == clocks.wall.now + 10
        assert events(pool, "clock") == []


@pytest.mark.parametrize("compacted", [False, True])
def test_time_stands_still_while_the_pool_is_away(tmp_path: Path, compacted: bool) -> None:
    """And a clock that was set meanwhile is the same: nothing tells the two apart."""
    clocks = Clocks()
    with clocks.opened(journal=tmp_path, channels={"train": {"group_timeout_s": 30, "n_rollouts": 2}}) as pool:
        pool.submit_steps([*group("a", 2), *group("b", 1)])
        lease = fetched(pool, lease_s=10).lease_id
        if compacted:
            pool.compact()
    for _ in range(2):
        clocks.wall.forward(7200)
        clocks.restarted()
        with clocks.opened(journal=tmp_path) as pool:
            assert ledger(pool) == {"submitted": 3, "leased": 2, "queued": 1}
    with clocks.opened(journal=tmp_path) as pool:
        assert pool.extend(lease, 10) == clocks.wall.now + 10
        clocks.forward(10)
        assert ledger(pool) == {"submitted": 3, "queued": 3}
        clocks.forward(20)
        assert ledger(pool) == {"submitted": 3, "queued": 2, "timeout": 1}


@pytest.mark.parametrize("compacted", [False, True])
def test_an_answer_can_be_asked_for_again_of_a_pool_that_was_away(tmp_path: Path, compacted: bool) -> None:
    clocks = Clocks()
    with clocks.opened(journal=tmp_path, channels={"train": {"replies_kept": 1}}) as pool:
        pool.submit_steps([*group("a"), *group("b")])
        assert [asked(pool, request) for request in ("u/1", "u/2")] == [["a"], ["b"]]
        if compacted:
            pool.compact()
    clocks.wall.forward(7200)
    clocks.restarted()
    with clocks.opened(journal=tmp_path) as pool:
        clocks.forward(89)
        assert [asked(pool, request) for request in ("u/1", "u/2")] == [["a"], ["b"]]
        clocks.forward(1)
        assert pool.fetch_batch(1, timeout=0, request_id="u/1") is None
        assert asked(pool, "u/2") == ["b"]


def test_a_clock_that_is_set_takes_no_batch_from_the_desks_trainer() -> None:
    clocks = Clocks()
    with clocks.opened() as pool:
        started(pool, batch_size=2)
        post(pool, 1)
        batch = pool.desk_batch(lease_s=10)
        assert batch is not None
        clocks.wall.forward(7200)
        clocks.forward(9)
        pool.desk_ack(batch.lease)
