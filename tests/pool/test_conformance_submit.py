"""Promise 2: a step is taken once. A retry is fine, a contradiction is an error, and what comes too late is told so."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.pool.kit import drain, events, fetched, group, keys, ledger, prompts, step, trajectory

from headrace import Step
from headrace.pool.errors import Conflict


def changed(one: Step, **fields: Any) -> Step:
    return msgspec.structs.replace(one, **fields)


def test_what_is_submitted_is_fetched_with_every_field(pool: Any) -> None:
    sent = Step(
        prompt_ids=[1, 2, 3],
        response_ids=[4, 5],
        rollout_log_probs=[-0.1, -0.2],
        trajectory_uid="t0",
        prompt_uid="p0",
        step_index=0,
        is_last=True,
        reward=1.0,
        policy_version=0,
        metadata={"task": "add", "nested": {"n": [1, 2.5, None]}},
        finish_reason="stop",
        sampling={"temperature": 0.7},
        multi_modal_data={"image": b"\x89PNG" * 100, "grid": np.arange(6, dtype="<f4").reshape(2, 3)},
        routed_experts=np.array([[3, 7], [1, 300]]),
        created_at=123.5,
        call_id="call-1",
        version_spans=((0, 0), (1, 1)),
        tags=["seed"],
        quality=0.5,
        note="by hand",
    )
    receipt = pool.submit_steps([sent])
    assert (receipt.accepted, receipt.duplicates, receipt.late, receipt.indices) == (1, 0, 0, (0,))
    batch = fetched(pool)
    assert batch.steps == [sent]
    assert ledger(pool) == {"submitted": 1, "consumed": 1}


def test_steps_may_be_dicts_and_a_batch_may_be_empty(pool: Any) -> None:
    assert pool.submit_steps([]).accepted == 0
    pool.submit_steps([step("t", last=True).to_dict()])
    assert fetched(pool).steps[0].trajectory_uid == "t"


def test_the_pool_fills_in_the_version_and_the_time(pool: Any) -> None:
    pool.set_version(7)
    pool.submit_step(step("t", last=True))
    pool.submit_step(step("u", last=True, policy_version=3))
    taken, named = fetched(pool, 2).steps
    assert taken.policy_version == 7
    assert taken.created_at > 1e9
    assert named.policy_version == 3


def test_a_version_set_for_all_channels_holds_for_those_to_come(pool: Any) -> None:
    pool.submit_step(step("t"))
    pool.set_version(4)
    pool.submit_step(step("u", last=True), channel="eval")
    assert fetched(pool, channel="eval").steps[0].policy_version == 4


def test_the_same_step_again_is_a_duplicate(pool: Any) -> None:
    steps = trajectory("t", 3)
    pool.submit_steps(steps)
    again = pool.submit_steps(steps)
    assert (again.accepted, again.duplicates, again.indices) == (0, 3, (0, 1, 2))
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1), ("t", 2)]
    assert ledger(pool) == {"submitted": 3, "consumed": 3}


def test_a_duplicate_after_consumption_does_not_train_again(pool: Any) -> None:
    steps = trajectory("t", 3)
    pool.submit_steps(steps)
    assert drain(pool) == ["t"]
    for one in reversed(steps):
        again = pool.submit_step(one)
        assert (again.accepted, again.duplicates, again.late) == (0, 1, 0)
    assert drain(pool) == []
    assert ledger(pool) == {"submitted": 3, "consumed": 3}


def test_a_duplicate_under_a_lease_changes_nothing(pool: Any) -> None:
    steps = trajectory("t", 2)
    pool.submit_steps(steps)
    batch = fetched(pool, lease_s=600)
    assert pool.submit_steps(steps).duplicates == 2
    batch.ack()
    assert ledger(pool) == {"submitted": 2, "consumed": 2}


@pytest.mark.parametrize(
    "other",
    [
        {"response_ids": [8, 9]},
        {"prompt_ids": [3, 2, 1]},
        {"prompt_ids": [1, 2, 3, 4]},
        {"rollout_log_probs": [-0.5, -0.75]},
        {"rollout_log_probs": None},
    ],
)
def test_other_content_under_a_taken_index_is_a_conflict(pool: Any, other: dict[str, Any]) -> None:
    pool.submit_step(step("t"))
    with pytest.raises(Conflict, match=r"step 1: step 0 of 't' .*none of the 2 steps was taken"):
        pool.submit_steps([step("new", last=True), changed(step("t"), **other)])
    assert ledger(pool) == {"submitted": 1, "queued": 1}
    assert drain(pool) == []


def test_other_content_after_consumption_is_a_conflict(pool: Any) -> None:
    pool.submit_step(step("t", last=True))
    drain(pool)
    with pytest.raises(Conflict, match="consumed"):
        pool.submit_step(changed(step("t"), response_ids=[8, 9]))
    assert ledger(pool) == {"submitted": 1, "consumed": 1}


def test_a_batch_may_repeat_itself_but_not_contradict_itself(pool: Any) -> None:
    receipt = pool.submit_steps([step("t"), step("t"), step("t", 1, last=True)])
    assert (receipt.accepted, receipt.duplicates, receipt.indices) == (2, 1, (0, 0, 1))
    with pytest.raises(Conflict):
        pool.submit_steps([step("u"), changed(step("u"), response_ids=[8, 9])])
    assert ledger(pool) == {"submitted": 2, "queued": 2}
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1)]


def test_a_later_reward_end_and_metadata_merge(pool: Any) -> None:
    pool.submit_step(step("t", metadata={"a": 1, "b": 1}))
    receipt = pool.submit_step(step("t", reward=2.0, last=True, metadata={"b": 2, "c": 3}))
    assert receipt.duplicates == 1
    (found,) = fetched(pool).steps
    assert (found.reward, found.is_last, found.metadata) == (2.0, True, {"a": 1, "b": 2, "c": 3})


def test_within_one_batch_they_merge_too(pool: Any) -> None:
    pool.submit_steps([step("t", metadata={"a": 1}), step("t", reward=2.0, last=True, metadata={"b": 2})])
    (found,) = fetched(pool).steps
    assert (found.reward, found.is_last, found.metadata) == (2.0, True, {"a": 1, "b": 2})


def test_a_trajectory_belongs_to_one_group(pool: Any) -> None:
    pool.submit_step(step("t", prompt="p"))
    for steps in ([step("t", 1, prompt="q")], [step("u", prompt="p"), step("u", 1, prompt="q")]):
        with pytest.raises(Conflict, match="belongs to group 'p'"):
            pool.submit_steps(steps)
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_the_last_step_cannot_come_before_another(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 2)])
    with pytest.raises(Conflict, match="step 1 of 't' says is_last, but step 2 is there"):
        pool.submit_step(step("t", 1, last=True))
    with pytest.raises(Conflict, match="step 0 of 't' says is_last, but step 2 is there"):
        pool.submit_step(step("t", 0, last=True))
    assert ledger(pool) == {"submitted": 2, "queued": 2}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_trajectory_is_complete_when_its_last_step_and_all_before_it_are_there(pool: Any, order: Any) -> None:
    steps = trajectory("t", 3)
    for at in order:
        assert pool.fetch_batch(1, timeout=0) is None
        pool.submit_step(steps[at])
    batch = fetched(pool)
    assert keys(batch.steps) == [("t", 0), ("t", 1), ("t", 2)]
    assert [found.prompt_ids.tolist() for found in batch.steps] == [sent.prompt_ids.tolist() for sent in steps]
    (sequence,) = batch.sequences()
    assert sequence.tokens.tolist() == [*steps[2].prompt_ids, *steps[2].response_ids]


def test_steps_past_the_end_are_late(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 2))
    receipt = pool.submit_steps([step("t", 2), step("t", 3, last=True)])
    assert (receipt.accepted, receipt.late, receipt.indices) == (0, 2, (-1, -1))
    assert ledger(pool) == {"submitted": 4, "queued": 2, "late": 2}
    assert events(pool, "late_steps") == [{"trajectory": "t", "steps": 2, "reason": "late"}]
    assert keys(fetched(pool).steps) == [("t", 0), ("t", 1)]


def test_late_steps_for_a_dropped_group_are_counted_and_told_and_start_nothing(pool: Any) -> None:
    pool.configure(max_queue_size=1)
    pool.submit_step(step("slow"))
    pool.submit_steps(group("fast"))
    assert [event["group"] for event in events(pool, "drop")] == ["slow"]
    receipt = pool.submit_steps([step("slow", 1), step("slow", 2, last=True)])
    assert (receipt.accepted, receipt.late) == (0, 2)
    assert pool.submit_step(step("slow")).duplicates == 1
    assert drain(pool) == ["fast"]
    assert ledger(pool) == {"submitted": 4, "consumed": 1, "capacity": 1, "late": 2}
    assert pool.complete("slow", reward=1.0).status == "late"


def test_late_steps_for_a_consumed_trajectory_are_late(pool: Any) -> None:
    pool.submit_steps(trajectory("t", 2))
    drain(pool)
    receipt = pool.submit_steps([step("t", 1, last=True), step("t", 2)])
    assert (receipt.duplicates, receipt.late) == (1, 1)
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "late": 1}


def test_quarantined_steps_are_kept_apart_and_never_handed_out(pool: Any) -> None:
    pool.submit_steps([step("t", 0), step("t", 1, quarantined="no log-probs"), step("t", 2, last=True)])
    assert ledger(pool) == {"submitted": 3, "queued": 2, "quarantined": 1}
    assert events(pool, "quarantine") == [{"trajectory": "t", "step": 1, "reason": "no log-probs"}]
    batch = fetched(pool)
    assert keys(batch.steps) == [("t", 0), ("t", 2)]
    assert [span.step_index for q in batch.sequences() for span in q.spans if span.trained] == [0, 2]
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "quarantined": 1}


def test_a_group_of_nothing_but_quarantined_steps_goes_by_itself(pool: Any) -> None:
    pool.submit_step(step("t", last=True, quarantined="bad"))
    pool.submit_step(step("u", last=True))
    assert drain(pool) == ["u"]
    assert pool.stats("train")["groups"]["queued"] == 0
    assert ledger(pool) == {"submitted": 2, "consumed": 1, "quarantined": 1}
    assert pool.submit_step(step("t", last=True, quarantined="bad")).duplicates == 1


def test_a_producer_may_send_only_what_is_new(pool: Any) -> None:
    whole = trajectory("t", 3)
    cut = [
        whole[0],
        changed(whole[1], prompt_ids=[], builds_on=(0, 5)),
        changed(whole[2], prompt_ids=whole[2].prompt_ids[4:], builds_on=(1, 4)),
    ]
    pool.submit_steps(cut)
    assert pool.submit_steps(cut).duplicates == 3
    assert pool.submit_steps(whole).duplicates == 3
    assert [found.prompt_ids.tolist() for found in fetched(pool).steps] == [s.prompt_ids.tolist() for s in whole]
    assert pool.submit_steps(cut).duplicates == 3


@pytest.mark.parametrize(("base", "said"), [((5, 3), "it is not there"), ((0, 6), "it has 5 tokens")])
def test_what_builds_on_what_is_not_there_is_refused(pool: Any, base: Any, said: str) -> None:
    pool.submit_step(step("t"))
    with pytest.raises(ValueError, match=said):
        pool.submit_steps([step("u"), changed(step("t", 1), builds_on=base)])
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_a_rewritten_history_is_a_tree(pool: Any) -> None:
    first, second = trajectory("t", 2)
    rewritten = step("t", 2, last=True, prompt_ids=[1, 2, 9])
    pool.submit_steps([first, changed(second, is_last=False), rewritten])
    assert pool.trajectory("t").parents == {0: -1, 1: 0, 2: -1}
    batch = fetched(pool)
    assert len(batch.sequences()) == 2
    assert sum(int(q.loss_mask.sum()) for q in batch.sequences()) == 6
    assert prompts(batch) == ["t"]


@pytest.mark.parametrize(("index", "told"), [(60, "duplicates"), (99_999, "late")])
def test_a_retry_of_a_step_far_behind_all_others_is_late_once_it_is_gone(pool: Any, index: int, told: str) -> None:
    """A place for each step that never came would be kept for the sake of one."""
    pool.configure(max_queue_size=1)
    far = Step(prompt_ids=[1], response_ids=[2], trajectory_uid="far", step_index=index)
    assert pool.submit_step(far).accepted == 1
    pool.submit_step(step("newer"))
    assert getattr(pool.submit_step(far), told) == 1
    assert ledger(pool)["capacity"] == 1


def test_tombstones_are_kept_in_number(pool: Any) -> None:
    """Beyond what the channel remembers, an old trajectory's retry is new again: the price of a bound."""
    pool.configure(tombstones=2)
    for i in range(3):
        pool.submit_step(step(f"t{i}", last=True))
    assert drain(pool) == ["t0", "t1", "t2"]
    assert pool.stats("train")["tombstones"] == 2
    assert pool.submit_step(step("t1", last=True)).duplicates == 1
    assert pool.submit_step(step("t0", last=True)).accepted == 1
