"""`unit="step"`: steps handed out as they arrive, before their episode ends, under the same leases and ledger."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import SOON, Threads, drain, events, fetched, group, keys, ledger, step, trajectory, until_blocked

from headrace.pool.errors import Conflict, LeaseLost


def single(pool: Any, size: int = 1, **options: Any) -> Any:
    return fetched(pool, size, unit="step", **options)


def test_steps_are_handed_out_as_they_arrive_each_with_its_whole_prompt(pool: Any) -> None:
    sent = [step("t", 0), step("u", 0), step("t", 1), step("u", 1)]
    for one in sent:
        pool.submit_step(one)
    batch = single(pool, 3)
    assert keys(batch.steps) == [("t", 0), ("u", 0), ("t", 1)]
    assert [found.prompt_ids.tolist() for found in batch.steps] == [s.prompt_ids.tolist() for s in sent[:3]]
    assert len(batch.groups) == 3
    assert len(batch.sequences()) == 3
    assert ledger(pool) == {"submitted": 4, "consumed": 3, "queued": 1}


def test_too_few_steps_are_not_taken(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1)])
    assert pool.fetch_batch(3, unit="step", timeout=0) is None
    assert ledger(pool) == {"submitted": 2, "queued": 2}


def test_a_blocked_fetch_of_steps_is_woken_by_a_step(pool: Any, threads: Threads) -> None:
    waiting = threads.submit(pool.fetch_batch, 2, unit="step")
    until_blocked(pool)
    pool.submit_step(step("t", 0))
    pool.submit_step(step("t", 1))
    assert keys(waiting.result(SOON).steps) == [("t", 0), ("t", 1)]


def test_latest_gives_the_newest_steps(pool: Any) -> None:
    for i in range(4):
        pool.submit_step(step("t", i, created_at=100.0 + i))
    assert keys(single(pool, 2, order="latest").steps) == [("t", 3), ("t", 2)]


def test_a_group_that_gave_single_steps_is_no_group_any_more(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 2))
    single(pool)
    assert drain(pool) == []
    assert keys(single(pool).steps) == [("t", 1)]
    assert pool.stats("train")["groups"]["queued"] == 0
    assert ledger(pool) == {"submitted": 2, "consumed": 2}


@pytest.mark.parametrize("end", ["a last step", "complete"])
def test_an_episode_that_ends_after_its_steps_were_taken_leaves_nothing_behind(pool: Any, end: str) -> None:
    pool.submit_step(step("t", 0))
    single(pool)
    if end == "complete":
        assert pool.complete("t").status == "ok"
    else:
        pool.submit_step(step("t", 1, last=True))
        single(pool)
    stats = pool.stats("train")
    assert (stats["groups"]["queued"], stats["trajectories"]) == (0, 0)
    assert pool.submit_step(step("t", 0)).duplicates == 1


def test_single_steps_come_back_from_a_lost_lease_in_place_with_a_count(pool: Any) -> None:
    pool.submit_steps([step("t", i, created_at=100.0 + i) for i in range(3)])
    lost = single(pool, 2, lease_s=600)
    assert ledger(pool) == {"submitted": 3, "leased": 2, "queued": 1}
    lost.extend(0.05)
    again = single(pool, 3, lease_s=600)
    assert keys(again.steps) == [("t", 0), ("t", 1), ("t", 2)]
    assert [found.deliveries for found in again.groups] == [2, 2, 1]
    with pytest.raises(LeaseLost):
        lost.ack()
    again.ack()
    assert ledger(pool) == {"submitted": 3, "consumed": 3}


def test_single_steps_are_given_back_by_a_nack(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1)])
    single(pool, 2, lease_s=600).nack()
    assert ledger(pool) == {"submitted": 2, "queued": 2}
    assert keys(single(pool, 2).steps) == [("t", 0), ("t", 1)]
    assert [event["reason"] for event in events(pool, "redelivery")] == ["nack"]


@pytest.mark.parametrize("end", ["nack", "expired"])
def test_a_group_whose_single_steps_are_all_back_is_a_group_again(pool: Any, end: str) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([*trajectory("a", 2, "p"), *trajectory("b", 2, "p")])
    batch = single(pool, 2, lease_s=600)
    assert drain(pool) == []
    if end == "nack":
        batch.nack()
    else:
        batch.extend(0.05)
    (found,) = fetched(pool, 1, timeout=SOON).groups
    assert [len(one.steps) for one in found.trajectories] == [2, 2]


def test_a_group_without_the_trajectory_whose_steps_were_out_is_a_group_again(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([*trajectory("a", 2, "p"), *trajectory("b", 2, "p")])
    single(pool, 1, lease_s=600)
    pool.forget("a")
    pool.submit_steps(trajectory("c", 2, "p"))
    (found,) = fetched(pool, 1, timeout=SOON).groups
    assert [one.uid for one in found.trajectories] == ["b", "c"]


def test_the_reward_of_a_step_that_was_handed_out_is_late(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1)])
    batch = single(pool, lease_s=600)
    assert pool.reward("t", 1.0, step_index=0) == "late"
    assert pool.reward("t", 2.0, step_index=1) == "ok"
    batch.ack()
    assert pool.reward("t", 3.0, step_index=0) == "late"
    assert pool.submit_step(step("t", 0, reward=4.0)).duplicates == 1
    assert [event["reward"] for event in events(pool, "late_reward")] == [1.0, 3.0, 4.0]
    with pytest.raises(Conflict, match="with a consumer"):
        pool.curate("t", 0, trainable=False)
    assert single(pool).steps[0].reward == 2.0
    assert pool.complete("t", reward=5.0).status == "late"


def test_a_channel_that_asks_for_rewards_offers_only_rewarded_steps(pool: Any) -> None:
    pool.configure(require_reward=True)
    pool.submit_steps([step("t", 0), step("t", 1, reward=1.0)])
    assert keys(single(pool).steps) == [("t", 1)]
    assert pool.fetch_batch(1, unit="step", timeout=0) is None
    pool.reward("t", 0.5, step_index=0)
    assert keys(single(pool).steps) == [("t", 0)]


def test_quarantined_steps_and_leased_groups_are_not_offered(pool: Any) -> None:
    pool.submit_steps([*group("p"), step("t", 0, quarantined="bad"), step("t", 1)])
    batch = fetched(pool, lease_s=600)
    assert keys(single(pool).steps) == [("t", 1)]
    assert pool.fetch_batch(1, unit="step", timeout=0) is None
    batch.nack()
    assert keys(single(pool).steps) == [("p/0", 0)]


def test_a_step_that_comes_after_others_were_taken_is_offered(pool: Any) -> None:
    pool.submit_step(step("t", 0))
    batch = single(pool, lease_s=600)
    pool.submit_step(step("t", 1, last=True))
    assert keys(single(pool).steps) == [("t", 1)]
    batch.ack()
    assert pool.stats("train")["groups"] == {"queued": 0, "ready": 0, "leased": 0, "history": 0}


@pytest.mark.parametrize("first", [0, 1])
def test_staleness_and_capacity_spare_steps_that_are_out(pool: Any, first: int) -> None:
    """Also where the version had moved before, so that the channel already looks for what is stale."""
    pool.configure(max_staleness=0, max_queue_size=1)
    pool.set_version(first)
    pool.submit_steps([step("t", 0), step("t", 1)])
    batch = single(pool, lease_s=600)
    pool.set_version(2)
    pool.submit_step(step("u", 0))
    assert ledger(pool) == {"submitted": 3, "leased": 1, "queued": 1, "capacity": 1}
    batch.ack()
    pool.set_version(3)
    assert ledger(pool) == {"submitted": 3, "consumed": 1, "stale": 1, "capacity": 1}
