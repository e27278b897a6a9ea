"""What a gateway needs: announcing a trajectory, steps whose index the pool assigns, and a cold start."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import answer, drain, fetched, group, keys, ledger, step, trajectory

from headrace import Step
from headrace.pool.errors import Conflict


def call(uid: str, call_id: str | None, turn: int, **fields: Any) -> Step:
    """The step of one call, which does not know its index."""
    return step(uid, None, response_ids=answer(uid, turn), call_id=call_id, **fields)


# -- open -------------------------------------------------------------------------------------------------------------


def test_an_opened_trajectory_has_its_place_before_its_first_step(pool: Any) -> None:
    pool.open("early", "early")
    pool.submit_steps(group("late"))
    pool.submit_step(step("early", last=True))
    assert drain(pool) == ["early", "late"]


def test_open_again_adds_metadata(pool: Any) -> None:
    pool.open("t", "p", metadata={"a": 1, "b": 1}, n_rollouts=3)
    pool.open("t", "p", metadata={"b": 2, "c": 3})
    pool.open("t", "p")
    found = pool.trajectory("t")
    assert (found.metadata, found.n_rollouts) == ({"a": 1, "b": 2, "c": 3}, 3)
    assert pool.stats("train")["trajectories"] == 1


def test_a_trajectory_without_steps_may_move_to_another_group_with_all_it_has(pool: Any) -> None:
    pool.open("t", "p", metadata={"a": 1}, n_rollouts=2)
    pool.open("other", "p")
    pool.open("t", "q")
    found = pool.trajectory("t")
    assert (found.prompt_uid, found.metadata, found.n_rollouts) == ("q", {"a": 1}, 2)
    pool.submit_step(step("other", prompt="p", last=True))
    assert drain(pool) == ["p"]
    pool.submit_step(step("t", prompt="q"))
    with pytest.raises(Conflict, match="cannot move to 'p'"):
        pool.open("t", "p")


def test_a_trajectory_that_is_gone_cannot_be_opened_again(pool: Any) -> None:
    pool.submit_step(step("t", last=True))
    drain(pool)
    with pytest.raises(Conflict, match="is consumed: open another"):
        pool.open("t")


def test_without_a_prompt_a_trajectory_is_its_own_group(pool: Any) -> None:
    pool.open("t")
    assert pool.trajectory("t").prompt_uid == "t"


def test_metadata_of_a_trajectory_comes_with_its_batch(pool: Any) -> None:
    pool.open("t", "p", metadata={"task": 7})
    pool.submit_steps(trajectory("t", 2, "p"))
    batch = fetched(pool)
    assert batch.groups[0].trajectories[0].metadata == {"task": 7}
    assert batch.sequences()[0].metadata == {"task": 7}


# -- by call id -------------------------------------------------------------------------------------------------------


def test_the_pool_assigns_the_step_index(pool: Any) -> None:
    receipts = [pool.submit_step(call("t", f"c{i}", i)) for i in range(3)]
    assert [receipt.indices for receipt in receipts] == [(0,), (1,), (2,)]
    assert pool.submit_steps([call("u", "c0", 0), call("u", "c1", 1)]).indices == (0, 1)
    pool.complete("t")
    assert [found.response_ids.tolist() for found in fetched(pool).steps] == [answer("t", i) for i in range(3)]


def test_a_call_sent_again_keeps_its_index(pool: Any) -> None:
    pool.submit_step(call("t", "c0", 0))
    pool.submit_step(call("t", "c1", 1))
    again = pool.submit_steps([call("t", "c0", 0), call("t", "c1", 1), call("t", "c2", 2)])
    assert (again.accepted, again.duplicates, again.indices) == (1, 2, (0, 1, 2))


def test_a_call_sent_again_with_other_content_is_a_conflict(pool: Any) -> None:
    pool.submit_step(call("t", "c0", 0))
    with pytest.raises(Conflict):
        pool.submit_step(call("t", "c0", 1))
    with pytest.raises(Conflict):
        pool.submit_steps([call("u", "c0", 0), call("u", "c0", 1)])
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_a_call_sent_again_after_consumption_is_a_duplicate(pool: Any) -> None:
    pool.submit_steps([call("t", "c0", 0), call("t", "c1", 1)])
    pool.complete("t")
    drain(pool)
    again = pool.submit_steps([call("t", "c1", 1), call("t", "c0", 0)])
    assert (again.duplicates, again.late, again.indices) == (2, 0, (1, 0))
    assert pool.submit_step(call("t", "c2", 2)).late == 1
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "late": 1}


def test_steps_without_index_and_call_id_are_each_the_next(pool: Any) -> None:
    same = [call("t", None, 0), call("t", None, 0)]
    assert pool.submit_steps(same).indices == (0, 1)
    assert pool.submit_step(call("t", None, 0)).indices == (2,)


def test_the_same_call_id_in_two_trajectories_is_two_calls(pool: Any) -> None:
    assert pool.submit_steps([call("t", "c", 0), call("u", "c", 0)]).indices == (0, 0)


# -- the end of an episode --------------------------------------------------------------------------------------------


def test_without_a_grace_a_call_after_the_end_is_late(pool: Any) -> None:
    pool.submit_step(call("t", "c0", 0))
    pool.complete("t")
    assert pool.submit_step(call("t", "c1", 1)).late == 1


def test_within_the_grace_a_call_that_ended_after_complete_still_joins(pool: Any) -> None:
    pool.configure(grace_s=600)
    pool.submit_step(call("t", "c0", 0))
    pool.complete("t", reward=1.0)
    assert pool.fetch_batch(1, timeout=0) is None
    assert pool.submit_step(call("t", "c1", 1)).indices == (1,)
    assert pool.submit_step(step("t", 5)).late == 1
    pool.configure(grace_s=0)
    first, second = fetched(pool).steps
    assert keys([first, second]) == [("t", 0), ("t", 1)]
    assert (first.is_last, second.is_last) == (False, True)


def test_a_group_is_ready_when_its_grace_is_over(pool: Any) -> None:
    pool.configure(grace_s=0.05, n_rollouts=2)
    pool.submit_steps([step("a", prompt="p", last=True), step("b", 1, prompt="p", last=True), step("b", 0, prompt="p")])
    assert keys(fetched(pool).steps) == [("a", 0), ("b", 0), ("b", 1)]


def test_a_trajectory_without_steps_moves_to_another_channel_with_what_was_said_of_it(pool: Any) -> None:
    pool.open("t", "p", "train", {"answer": 42}, 2)
    pool.open("t", None, "val", {"source": "late"}, move=True)
    found = pool.trajectory("t")
    assert (found.channel, found.prompt_uid, found.n_rollouts) == ("val", "p", 2)
    assert found.metadata == {"answer": 42, "source": "late"}
    assert pool.complete("t").status == "ok"
    assert pool.list_trajectories("train")["items"] == []


def test_a_trajectory_with_steps_stays_in_its_channel(pool: Any) -> None:
    pool.submit_step({"trajectory_uid": "t", "prompt_ids": [1], "response_ids": [2]}, "train")
    with pytest.raises(Conflict, match="channel 'train'"):
        pool.open("t", None, "val", move=True)
    assert pool.trajectory("t").channel == "train"
