"""Promises 3 and 5: when a group is ready, what goes with it, and what its rewards do."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import drain, events, fetched, group, keys, ledger, prompts, step, trajectory

from headrace.pool.errors import NotFound


def members(found: Any) -> list[str]:
    return [one.uid for one in found.trajectories]


# -- readiness --------------------------------------------------------------------------------------------------------


def test_a_group_is_ready_when_enough_of_its_trajectories_are_complete(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    for i in range(3):
        assert pool.fetch_batch(1, timeout=0) is None
        pool.submit_steps(trajectory(f"t{i}", 2, "p"))
    (found,) = fetched(pool).groups
    assert members(found) == ["t0", "t1", "t2"]
    assert (found.deliveries, found.replayed, found.partial) == (1, False, False)


def test_groups_come_oldest_first_whichever_was_ready_first(pool: Any) -> None:
    pool.submit_steps([step("a"), step("b"), step("c")])
    for uid in "cab":
        pool.complete(uid)
    assert prompts(fetched(pool, 3)) == ["a", "b", "c"]


def test_a_straggler_before_a_hundred_ready_groups_blocks_none(pool: Any) -> None:
    pool.submit_step(step("straggler"))
    ready = [f"p{i:03}" for i in range(100)]
    pool.submit_steps([one for prompt in ready for one in group(prompt)])
    assert prompts(fetched(pool, 100)) == ready
    pool.complete("straggler")
    assert drain(pool) == ["straggler"]


def test_what_a_trajectory_asks_for_goes_before_the_channels_n_rollouts(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    pool.open("small", "p", n_rollouts=1)
    pool.submit_steps(trajectory("small", 1, "p"))
    assert prompts(fetched(pool)) == ["p"]
    pool.open("large/0", "large", n_rollouts=4)
    pool.submit_steps(group("large", 3))
    assert pool.fetch_batch(1, timeout=0) is None
    pool.submit_steps(trajectory("large/3", 1, "large"))
    assert len(fetched(pool).groups[0].trajectories) == 4


def test_without_any_word_a_group_is_one_trajectory(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 1, "p"))
    assert prompts(fetched(pool)) == ["p"]


def test_a_fetch_below_the_channels_n_rollouts_takes_what_is_complete(pool: Any) -> None:
    pool.configure(n_rollouts=4)
    pool.submit_steps([*group("p", 3), step("p/3", 0, "p")])
    assert pool.fetch_batch(1, n_rollouts=4, timeout=0) is None
    (found,) = fetched(pool, n_rollouts=2).groups
    assert members(found) == ["p/0", "p/1", "p/2"]
    assert ledger(pool) == {"submitted": 4, "consumed": 3, "surplus": 1}
    assert events(pool, "surplus") == [{"trajectories": ["p/3"]}]
    assert pool.submit_step(step("p/3", 1, "p", last=True)).late == 1
    assert drain(pool, n_rollouts=1) == []


def test_a_fetch_above_the_channels_n_rollouts_raises_nothing(pool: Any) -> None:
    pool.submit_steps(group("p", 2))
    (found,) = fetched(pool, n_rollouts=8).groups
    assert members(found) == ["p/0"]
    assert ledger(pool) == {"submitted": 2, "consumed": 1, "surplus": 1}


def test_a_lowered_fetch_keeps_the_order_by_age(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    for prompt, n in (("a", 2), ("b", 3), ("c", 1), ("d", 2), ("e", 3)):
        pool.submit_steps(group(prompt, n))
    assert prompts(pool.fetch_batch(4, n_rollouts=2, timeout=0)) == ["a", "b", "d", "e"]


def test_trajectories_beyond_the_wanted_number_are_surplus_the_first_complete_stay(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([step(f"t{i}", 0, "p") for i in range(4)])
    for uid in ("t3", "t1", "t0"):
        pool.complete(uid)
    (found,) = fetched(pool).groups
    assert sorted(members(found)) == ["t1", "t3"]
    assert ledger(pool) == {"submitted": 4, "consumed": 2, "surplus": 2}
    for uid in ("t0", "t2"):
        assert pool.reward(uid, 1.0) == "late"


def test_a_trajectory_that_a_closed_group_still_expected_is_late_then_a_new_group_begins(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    pool.submit_steps(group("p", 2))
    assert prompts(fetched(pool, n_rollouts=2)) == ["p"]
    late = pool.submit_steps(trajectory("p/2", 2, "p"))
    assert (late.accepted, late.late) == (0, 2)
    assert pool.submit_steps(trajectory("q/0", 1, "p")).accepted == 1
    assert ledger(pool) == {"submitted": 5, "consumed": 2, "late": 2, "queued": 1}


def test_the_same_prompt_again_after_its_group_was_full_is_a_new_group(pool: Any) -> None:
    pool.submit_steps(trajectory("first", 1, "p"))
    assert drain(pool) == ["p"]
    pool.submit_steps(trajectory("second", 1, "p"))
    assert members(fetched(pool).groups[0]) == ["second"]


def test_what_follows_a_group_that_ends_in_the_middle_of_a_submit_joins_no_other_prompts(pool: Any) -> None:
    pool.open("a/0", "a")
    ended = step("a/0", 0, "a", quarantined="it smells", last=True)
    pool.submit_steps([ended, *trajectory("a/1", 1, "a"), step("a/2", 0, "a"), *trajectory("b"), *trajectory("c")])
    listed = {row["prompt_uid"]: row["trajectories"] for row in pool.list_groups()["items"]}
    assert listed == {"a": 2, "b": 1, "c": 1}
    assert [members(found) for found in fetched(pool, 3).groups] == [["b"], ["c"], ["a/1"]]


def test_an_empty_trajectory_counts_for_its_group(pool: Any) -> None:
    """An agent that ended before its first call: the group need not wait for it."""
    pool.configure(n_rollouts=2)
    pool.open("t0", "p")
    pool.submit_steps(trajectory("t1", 1, "p"))
    assert pool.complete("t0").status == "ok"
    batch = fetched(pool)
    assert keys(batch.steps) == [("t1", 0)]
    assert batch.groups[0].rewards == [None, None]


def test_a_changed_n_rollouts_makes_waiting_groups_ready(pool: Any) -> None:
    pool.configure(n_rollouts=4)
    pool.submit_steps(group("p", 2))
    pool.configure(n_rollouts=2)
    assert prompts(fetched(pool)) == ["p"]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_complete_ends_a_trajectory_where_it_is(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1)])
    done = pool.complete("t", reward=0.5)
    assert (done.status, done.steps) == ("ok", 2)
    first, second = fetched(pool).steps
    assert (first.is_last, first.reward) == (False, None)
    assert (second.is_last, second.reward) == (True, 0.5)


def test_a_trajectory_with_fewer_steps_than_asked_for_stays_open(pool: Any) -> None:
    pool.open("t")
    done = pool.complete("t", min_steps=1)
    assert (done.status, done.steps) == ("too_few", 0)
    pool.submit_step(step("t", 0))
    assert pool.complete("t", reward=0.5, min_steps=2).status == "too_few"
    assert pool.trajectory("t").reward is None
    assert pool.complete("t", reward=0.5, min_steps=1).status == "ok"
    assert fetched(pool).steps[0].reward == 0.5


def test_complete_waits_for_a_step_that_is_missing_in_the_middle(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 2)])
    assert pool.complete("t").status == "ok"
    assert pool.fetch_batch(1, timeout=0) is None
    pool.submit_step(step("t", 1))
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1), ("t", 2)]


def test_complete_of_what_is_unknown_or_gone_says_so(pool: Any) -> None:
    assert pool.complete("nobody").status == "unknown"
    assert pool.complete_trajectory("nobody") is False
    pool.submit_steps([step("t"), step("u"), step("v", last=True)])
    assert pool.complete_trajectory("t", reward=1.0) is True
    batch = fetched(pool, lease_s=600)
    assert pool.complete("t", reward=2.0).status == "late"
    batch.ack()
    assert pool.complete("t", reward=3.0).status == "late"
    assert pool.complete_trajectory("t") is False
    assert [event["reward"] for event in events(pool, "late_reward")] == [2.0, 3.0]


def test_complete_again_is_fine_and_may_bring_the_reward(pool: Any) -> None:
    pool.submit_step(step("t", last=True))
    assert pool.complete("t").status == "ok"
    assert pool.complete("t", reward=1.5).status == "ok"
    assert fetched(pool).groups[0].rewards == [1.5]


def test_a_reward_for_a_trajectory_without_steps_is_not_lost_in_silence(pool: Any) -> None:
    pool.open("t", "p")
    pool.complete("t", reward=1.0)
    assert events(pool, "late_reward") == [{"trajectory": "t", "reward": 1.0}]


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_a_trajectorys_reward_is_the_sum_of_its_steps(pool: Any) -> None:
    pool.submit_steps([step("t", 0, reward=0.5), step("t", 1), step("t", 2, last=True, reward=1.0)])
    assert pool.reward("t", 0.25, step_index=1) == "ok"
    batch = fetched(pool)
    assert batch.groups[0].rewards == [1.75]
    assert [q.reward for q in batch.sequences()] == [1.75]


def test_a_reward_without_an_index_is_the_last_steps_and_replaces_what_was_there(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1, last=True, reward=1.0)])
    pool.reward("t", 3.0)
    assert [found.reward for found in fetched(pool).steps] == [None, 3.0]


def test_rewards_count_until_hand_out_and_are_late_after_it(pool: Any) -> None:
    pool.submit_steps([*trajectory("t"), *trajectory("u")])
    assert pool.reward("t", 1.0) == "ok"
    batch = fetched(pool, lease_s=600)
    assert prompts(batch) == ["t"]
    assert pool.reward("t", 2.0) == "late"
    assert pool.submit_step(step("t", last=True, reward=4.0)).duplicates == 1
    batch.ack()
    assert pool.reward("t", 3.0) == "late"
    assert [event["reward"] for event in events(pool, "late_reward")] == [2.0, 4.0, 3.0]
    assert pool.stats("train")["counts"]["late_rewards"] == 3
    assert pool.reward("u", 1.0) == "ok"


def test_a_reward_counts_again_once_the_lease_is_given_back(pool: Any) -> None:
    pool.submit_steps(trajectory("t"))
    fetched(pool, lease_s=600).nack()
    assert pool.reward("t", 2.0) == "ok"
    assert fetched(pool).groups[0].rewards == [2.0]


def test_rewards_for_what_is_not_there_are_refused(pool: Any) -> None:
    pool.submit_step(step("t"))
    pool.open("u", "u")
    for call in (
        lambda: pool.reward("nobody", 1.0),
        lambda: pool.reward("t", 1.0, step_index=4),
        lambda: pool.reward("u", 1.0),
        lambda: pool.reward("t", 1.0, channel="eval"),
    ):
        with pytest.raises(NotFound):
            call()


def test_reward_and_complete_find_a_trajectory_in_any_channel(pool: Any) -> None:
    pool.submit_step(step("t"), channel="eval")
    assert pool.reward("t", 1.0) == "ok"
    assert pool.complete("t").status == "ok"
    assert fetched(pool, channel="eval").groups[0].rewards == [1.0]
    assert pool.complete_trajectory("t", channel="train") is False


def test_a_channel_that_asks_for_rewards_waits_for_them(pool: Any) -> None:
    pool.configure(require_reward=True, n_rollouts=2)
    pool.submit_steps(group("p", 2, turns=2))
    pool.reward("p/0", 1.0)
    assert pool.fetch_batch(1, timeout=0) is None
    pool.reward("p/1", 0.0, step_index=0)
    assert fetched(pool).groups[0].rewards == [1.0, 0.0]


def test_asking_for_rewards_can_be_switched_on_and_off(pool: Any) -> None:
    pool.submit_steps([*group("p"), *group("q", reward=1.0)])
    pool.configure(require_reward=True)
    assert drain(pool) == ["q"]
    pool.configure(require_reward=False)
    assert drain(pool) == ["p"]
