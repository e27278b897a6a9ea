"""From groups to examples: who is left out, and what is a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import pool_of, sequence, submit_group

from headrace import DataPool, Step
from headrace.trainer.backends.tensors import PaddedBackend
from headrace.trainer.config import AlgorithmConfig
from headrace.trainer.examples import examples_of, rewards_at


def groups(pool: Any, size: int) -> Any:
    batch = pool.fetch_batch(size, timeout=0)
    assert batch is not None
    return batch.groups


def test_every_target_of_a_trajectory_has_its_advantage() -> None:
    found = examples_of(groups(pool_of([[0.0, 1.0]], turns=2), 1), AlgorithmConfig(advantage="rloo"))
    assert [set(s.advantages[s.loss_mask].tolist()) for s in found.sequences if s.advantages is not None] == [
        {-1.0},
        {1.0},
    ]
    assert found.rewards == [0.0, 1.0]


def test_groups_without_variance_are_left_out_and_counted_and_their_rewards_are_told() -> None:
    found = examples_of(groups(pool_of([[1.0, 1.0], [0.0, 1.0]]), 2), AlgorithmConfig())
    assert found.skipped.zero_variance == 1
    assert len(found.sequences) == 2
    assert found.rewards == [1.0, 1.0, 0.0, 1.0]


def test_groups_without_variance_stay_where_that_is_asked_for() -> None:
    found = examples_of(groups(pool_of([[1.0, 1.0]]), 1), AlgorithmConfig(skip_zero_variance=False))
    assert len(found.sequences) == 2


def test_trajectories_without_a_reward_are_left_out_unless_they_were_scored() -> None:
    pool = DataPool(channels={"train": {"n_rollouts": 3}})
    submit_group(pool, "g", [0.0, 1.0])
    pool.submit_steps(
        [Step(prompt_ids=[1], response_ids=[2], trajectory_uid="none", prompt_uid="g", step_index=0, is_last=True)]
    )
    handed = groups(pool, 1)
    found = examples_of(handed, AlgorithmConfig())
    assert (found.skipped.unrewarded, len(found.sequences)) == (1, 2)
    scored = examples_of(handed, AlgorithmConfig(advantage="dr_grpo"), scores={"none": 5.0})
    assert (scored.skipped.unrewarded, len(scored.sequences)) == (0, 3)
    assert scored.rewards == [0.0, 1.0, 5.0]


def test_long_sequences_are_left_out_whole_and_counted() -> None:
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    submit_group(pool, "short", [0.0, 1.0], tokens=2)
    submit_group(pool, "long", [0.0, 1.0], tokens=20)
    found = examples_of(groups(pool, 2), AlgorithmConfig(), max_length=10)
    assert found.skipped.long == 2
    assert {s.prompt_uid for s in found.sequences} == {"short"}


def test_sequences_with_images_are_left_out_and_counted() -> None:
    """One step with an image is enough: what comes after it was sampled in its sight."""
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    for uid, media in (("text", None), ("image", {"images": [{"data": b"file", "offset": 0, "length": 1}]})):
        about = {"trajectory_uid": uid, "prompt_uid": "g"}
        pool.submit_steps(
            [
                Step(prompt_ids=[1], response_ids=[2], step_index=0, reward=0.0, multi_modal_data=media, **about),
                Step(prompt_ids=[1, 2, 3], response_ids=[4], step_index=1, reward=len(uid), is_last=True, **about),
            ]
        )
    (group,) = handed = groups(pool, 1)
    found = examples_of(handed, AlgorithmConfig())
    assert [sequence.trajectory_uid for sequence in found.sequences] == ["text"]
    assert (found.skipped.media, found.skipped.untrainable) == (1, 1)
    padded = PaddedBackend(pad_id=0).convert(group.sequences())
    assert (len(padded.ids), padded.skipped) == (1, 1)


@pytest.mark.parametrize(("mask", "targets"), [(True, 0), (False, 8)])
def test_truncated_answers_are_masked_or_kept(mask: bool, targets: int) -> None:
    pool = pool_of([[0.0, 1.0]], finish_reason="length")
    found = examples_of(groups(pool, 1), AlgorithmConfig(mask_truncated=mask))
    assert found.targets == targets
    assert (found.skipped.truncated, found.skipped.untrainable) == ((2, 2) if mask else (0, 0))


def test_groups_of_one_learn_from_the_batch() -> None:
    pool = DataPool()
    for at in range(4):
        submit_group(pool, f"live{at}", [float(at)])
    found = examples_of(groups(pool, 4), AlgorithmConfig(advantage="dr_grpo"))
    assert [float(s.advantages[s.loss_mask][0]) for s in found.sequences if s.advantages is not None] == [
        -1.5,
        -0.5,
        0.5,
        1.5,
    ]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.one_of(st.none(), st.floats(-2, 2))), min_size=1, max_size=5),
    st.floats(-3, 3),
)
def test_a_sequences_rewards_sum_to_its_trajectorys_and_lie_on_targets(
    steps: list[tuple[int, float | None]], elsewhere: float
) -> None:
    spans, at = [], 2
    for size, _ in steps:
        spans.append((at, at + size))
        at += size + 2
    own = [reward for _, reward in steps]
    total = sum(reward or 0.0 for reward in own) + elsewhere
    made = sequence(spans, rewards=own, reward=total)
    found = rewards_at(made)
    assert found.sum() == pytest.approx(total)
    assert not found[~made.loss_mask].any()
    for (_, end), reward in list(zip(spans, own, strict=True))[:-1]:
        assert found[end - 1] == pytest.approx(reward or 0.0)


def test_a_reward_on_a_masked_answer_belongs_to_the_target_before_it() -> None:
    made = sequence([(2, 4), (6, 8)], rewards=[0.5, 1.0], reward=1.5)
    made.loss_mask[6:8] = False
    assert np.flatnonzero(rewards_at(made)).tolist() == [3]
    assert rewards_at(made)[3] == pytest.approx(1.5)
