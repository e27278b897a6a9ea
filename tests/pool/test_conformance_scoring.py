"""Rewards that say whom they are from, and what still waits for one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import SOON, fetched, group, step, trajectory, until_blocked

from headrace.data.errors import InvalidInput
from headrace.pool.errors import NotFound


def told(pool: Any, uid: str, index: int = -1) -> tuple[Any, ...]:
    found = pool.trajectory(uid).steps[index]
    return found.reward, found.metadata.get("reward_source"), found.metadata.get("reward_extra_info")


# -- whom a reward is from ---------------------------------------------------------------------------------------------


def test_a_reward_says_whom_it_is_from_and_what_it_was_made_of(pool: Any) -> None:
    pool.submit_steps(trajectory("a", 2, metadata={"own": 1}))
    assert pool.reward("a", 0.7, source="model", info={"format": 0.1, "math": 0.6}) == "ok"
    assert told(pool, "a") == (0.7, "model", {"format": 0.1, "math": 0.6})
    assert told(pool, "a", 0) == (None, None, None)
    (found,) = fetched(pool).sequences()
    assert found.metadata == {"reward_source": "model", "reward_extra_info": {"format": 0.1, "math": 0.6}}
    assert pool.reward("a", 1.0, source="person") == "late"


def test_what_another_reward_was_made_of_goes_with_it(pool: Any) -> None:
    pool.submit_steps(trajectory("a", metadata={"own": 1}))
    pool.reward("a", 0.7, source="model", info={"math": 0.7})
    assert pool.reward("a", 0.2) == "ok"
    assert told(pool, "a") == (0.2, None, None)
    assert pool.trajectory("a").steps[0].metadata == {"own": 1}


@pytest.mark.parametrize("source", [None, "model", "agent"])
def test_a_persons_reward_is_replaced_by_a_persons_only(pool: Any, source: str | None) -> None:
    pool.submit_steps(trajectory("a"))
    pool.reward("a", 0.1, source="model")
    assert pool.reward("a", 1.0, source="person", info={"comment": "good"}) == "ok"
    assert pool.reward("a", 0.3, source=source, info={"math": 0.3}) == "kept"
    assert pool.complete("a", reward=0.4).status == "ok"
    own = {"reward_source": "model", "reward_extra_info": {}}
    assert pool.submit_steps(trajectory("a", reward=0.5, metadata=own)).duplicates == 1
    assert told(pool, "a") == (1.0, "person", {"comment": "good"})
    assert pool.reward("a", 0.0, source="person") == "ok"
    assert told(pool, "a") == (0.0, "person", None)


def test_steps_are_rewarded_together_or_not_at_all(pool: Any) -> None:
    pool.submit_steps([step("a", index) for index in range(4)])
    pool.reward("a", 1.0, 2, source="person")
    seeds = {0: 0.3, 1: 0.7, 2: 0.9, 3: 0.8}
    info = {1: {"math": 0.7}}
    assert pool.reward_steps("a", seeds, source="model", info=info) == {0: "ok", 1: "ok", 2: "kept", 3: "ok"}
    assert [told(pool, "a", index) for index in range(4)] == [
        (0.3, "model", None),
        (0.7, "model", {"math": 0.7}),
        (1.0, "person", None),
        (0.8, "model", None),
    ]
    with pytest.raises(NotFound, match="no step 4"):
        pool.reward_steps("a", {0: 0.0, 4: 0.0})
    assert told(pool, "a", 0) == (0.3, "model", None)


def test_rewards_of_nothing_but_quarantined_steps_end_their_group(pool: Any) -> None:
    pool.configure(require_reward=True)
    pool.submit_steps([step("a", index, quarantined="it smells", last=index == 2) for index in range(3)])
    assert pool.reward_steps("a", {0: 0.1, 1: 0.2, 2: 0.3}) == {0: "ok", 1: "ok", 2: "ok"}
    assert (pool.list_groups()["items"], waiting(pool)) == ([], [])


def test_steps_that_are_handed_out_are_late(pool: Any) -> None:
    pool.submit_steps([step("a", 0), step("a", 1)])
    fetched(pool, 1, unit="step")
    assert pool.reward_steps("a", {0: 1.0, 1: 1.0}) == {0: "late", 1: "ok"}
    pool.submit_steps(trajectory("b"))
    pool.fail("a", "crashed")
    fetched(pool)
    assert pool.reward_steps("b", {0: 1.0}) == {0: "late"}
    with pytest.raises(NotFound, match="'c'"):
        pool.reward_steps("c", {0: 1.0})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda pool: pool.reward("a", 1.0, source=""), "source"),
        (lambda pool: pool.reward("a", 1.0, source="x" * 65), "source"),
        (lambda pool: pool.reward("a", 1.0, info={"big": "x" * 2_000_000}), "1048576"),
        (lambda pool: pool.reward_steps("a", {}), "rewards"),
        (lambda pool: pool.reward_steps("a", {0: float("nan")}), "finite"),
        (lambda pool: pool.reward_steps("a", {-1: 1.0}), "step index"),
        (lambda pool: pool.reward_steps("a", {0: 1.0}, info={1: {}}), "info"),
        (lambda pool: pool.unscored(limit=0), "limit"),
        (lambda pool: pool.unscored(wait_s=-1), "timeout"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(pool: Any, call: Any, named: str) -> None:
    pool.submit_steps(trajectory("a"))
    with pytest.raises(InvalidInput, match=named):
        call(pool)
    assert told(pool, "a") == (None, None, None)


# -- what waits for one ------------------------------------------------------------------------------------------------


def waiting(pool: Any, **options: Any) -> list[str]:
    return [row["trajectory_uid"] for row in pool.unscored(**options)["items"]]


def test_complete_trajectories_without_a_reward_wait_oldest_first(pool: Any) -> None:
    pool.configure(require_reward=True)
    pool.submit_steps([*trajectory("a", 2, "p"), step("running", 0, "p"), *trajectory("paid", reward=1.0)])
    assert pool.unscored()["items"] == [{"trajectory_uid": "a", "prompt_uid": "p"}]
    pool.submit_steps(trajectory("b", 1))
    pool.complete("running")
    assert waiting(pool) == ["a", "b", "running"]
    pool.reward("b", 1.0)
    assert waiting(pool) == ["a", "running"]
    pool.fail("a", "reward: error", quarantine=True)
    pool.forget("running")
    assert waiting(pool) == []


def test_what_was_there_before_anyone_asked_waits_too(pool: Any) -> None:
    pool.submit_steps([one for at in range(3) for one in group(f"p{at}", 2)])
    pool.reward("p1/0", 1.0)
    assert waiting(pool) == ["p0/0", "p0/1", "p1/1", "p2/0", "p2/1"]


def test_a_cursor_shows_only_what_came_since(pool: Any) -> None:
    pool.submit_steps([one for at in range(5) for one in trajectory(f"t{at}")])
    first = pool.unscored(limit=2)
    assert [row["trajectory_uid"] for row in first["items"]] == ["t0", "t1"]
    second = pool.unscored(limit=10, after=first["next"])
    assert [row["trajectory_uid"] for row in second["items"]] == ["t2", "t3", "t4"]
    nothing = pool.unscored(after=second["next"])
    assert nothing == {"items": [], "next": second["next"]}
    pool.submit_steps(trajectory("t5"))
    assert waiting(pool, after=nothing["next"]) == ["t5"]
    assert len(waiting(pool)) == 6  # without a cursor, all of it again
    assert len(waiting(pool, after="another-7")) == 6  # nor with one that this pool never gave


def test_what_is_with_a_consumer_waits_for_nothing_until_it_is_back(pool: Any) -> None:
    pool.submit_steps([*trajectory("a"), *trajectory("b")])
    assert waiting(pool) == ["a", "b"]
    lease = fetched(pool, lease_s=100)
    assert waiting(pool) == ["b"]
    lease.nack()
    assert waiting(pool) == ["b", "a"]
    fetched(pool)
    assert waiting(pool) == ["b"]


def test_steps_wait_as_they_come(pool: Any) -> None:
    pool.submit_steps([step("a", 0), step("a", 1, quarantined="it smells")])

    def steps(**options: Any) -> list[tuple[str, int]]:
        rows = pool.unscored(steps=True, **options)["items"]
        return [(row["trajectory_uid"], row["step_index"]) for row in rows]

    assert steps() == [("a", 0)]
    pool.submit_steps([step("a", 2), step("b", 0, reward=1.0)])
    assert steps() == [("a", 0), ("a", 2)]
    pool.reward_steps("a", {0: 0.5})
    assert steps() == [("a", 2)]
    lease = fetched(pool, 1, unit="step", lease_s=100, order="fifo")
    lease.nack()
    assert steps() == [("a", 2)]
    pool.fail("a", "crashed")
    assert steps() == []


def test_a_group_that_ends_with_its_last_step_leaves_nothing_to_wait(pool: Any) -> None:
    pool.submit_steps(trajectory("a"))
    assert waiting(pool) == waiting(pool, steps=True) == ["a"]
    pool.submit_step(step("b", quarantined="it smells", last=True))
    assert waiting(pool) == waiting(pool, steps=True) == ["a"]


def test_a_long_poll_is_answered_when_something_comes_to_wait(pool: Any, threads: Any) -> None:
    pool.submit_step(step("a"))
    assert pool.unscored(wait_s=0.01) == {"items": [], "next": None}
    asked = threads.submit(pool.unscored, wait_s=SOON)
    until_blocked(pool)
    pool.complete("a")
    page = asked.result(SOON)
    assert [row["trajectory_uid"] for row in page["items"]] == ["a"]
    again = threads.submit(pool.unscored, after=page["next"], wait_s=SOON)
    until_blocked(pool)
    pool.submit_steps(trajectory("b"))
    assert [row["trajectory_uid"] for row in again.result(SOON)["items"]] == ["b"]


def test_a_channel_that_is_yet_to_come_can_be_waited_for(pool: Any, threads: Any) -> None:
    asked = threads.submit(pool.unscored, "val", wait_s=SOON)
    until_blocked(pool)
    pool.submit_steps(trajectory("a"), "val")
    assert [row["trajectory_uid"] for row in asked.result(SOON)["items"]] == ["a"]


# -- a row's fields ----------------------------------------------------------------------------------------------------


def test_a_trajectorys_metadata_is_in_every_step_and_a_steps_own_goes_before(pool: Any) -> None:
    row = {"data_source": "gsm8k", "ground_truth": "42", "level": 3}
    pool.open("a", "p", metadata=row)
    pool.submit_steps([step("a", 0, "p"), step("a", 1, "p", last=True, metadata={"level": 4})])
    merged = [{**row}, {**row, "level": 4}]
    assert [one.metadata for one in pool.trajectory("a").steps] == merged
    assert [one.metadata for one in pool.trajectory("a").own_steps] == [{}, {"level": 4}]
    batch = fetched(pool)
    assert [one.metadata for one in batch.steps] == merged
    assert [one.metadata for one in batch.groups[0].steps] == merged
    assert batch.sequences()[0].metadata == row


def test_steps_of_several_trajectories_have_each_their_own_rows_fields(pool: Any) -> None:
    for uid in ("a", "b"):
        pool.open(uid, uid, metadata={"row": uid})
        pool.submit_steps(trajectory(uid))
    pool.submit_steps(trajectory("c"))
    assert [one.metadata for one in fetched(pool, 3).steps] == [{"row": "a"}, {"row": "b"}, {}]
    pool.open("d", "d", metadata={"row": "d"})
    pool.submit_steps(trajectory("d"))
    assert fetched(pool, unit="step").steps[0].metadata == {"row": "d"}
