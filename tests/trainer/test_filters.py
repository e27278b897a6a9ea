"""Which trajectories are learned from: filters, DAPO's penalty, and what SFT and no advantage leave in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import pool_of, submit_group

from headrace import DataPool, Step
from headrace.data.trajectory import Group
from headrace.trainer.config import FILTERS as NAMES
from headrace.trainer.config import AlgorithmConfig, OverlongConfig
from headrace.trainer.examples import examples_of
from headrace.trainer.filters import FILTERS, FilterGroup, accuracy, min_reward, overlong_penalty


def of(rewards: list[float]) -> FilterGroup:
    return FilterGroup(np.array(rewards), np.ones(len(rewards), np.int64), np.zeros(len(rewards), np.bool_))


def groups(pool: Any, size: int = 1) -> list[Group]:
    batch = pool.fetch_batch(size, timeout=0)
    assert batch is not None
    return list(batch.groups)


def test_the_table_of_filters_is_what_a_configuration_may_name() -> None:
    assert tuple(FILTERS) == NAMES


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6))
def test_accuracy_leaves_out_groups_that_are_all_right_or_all_wrong(rewards: list[float]) -> None:
    right = sum(reward >= 1 for reward in rewards)
    assert accuracy(of(rewards)) == (0 < right < len(rewards))


def test_accuracy_has_bounds_of_its_own() -> None:
    assert not accuracy(of([0.0, 0.0, 0.0, 1.0]), low=0.25)
    assert not accuracy(of([0.0, 1.0, 1.0, 1.0]), high=0.75)
    assert accuracy(of([0.0, 0.5, 0.5]), correct=0.5)


def test_a_trajectory_without_a_reward_is_not_good_enough() -> None:
    assert min_reward(of([np.nan, 0.4, 0.5, 2.0]), at_least=0.5).tolist() == [False, False, True, True]


def test_what_filters_leave_out_is_counted_once_by_the_first_and_still_compared_with() -> None:
    config = AlgorithmConfig.model_validate(
        {"advantage": "dr_grpo", "filters": [{"use": "min_reward", "at_least": 1.0}, {"use": "accuracy"}]}
    )
    found = examples_of(groups(pool_of([[0.0, 1.0, 5.0], [2.0, 3.0, 4.0]]), 2), config)
    assert found.filtered == {"min_reward": 1, "accuracy": 3}
    assert [one.reward for one in found.sequences] == [1.0, 5.0]
    assert [
        float(one.advantages.sum() / one.loss_mask.sum()) for one in found.sequences if one.advantages is not None
    ] == [
        -1.0,
        3.0,
    ]
    assert found.rewards == [0.0, 1.0, 5.0, 2.0, 3.0, 4.0]
    assert found.trajectories == 6


def test_overlong_leaves_out_trajectories_that_ended_by_their_length() -> None:
    pool = DataPool(channels={"train": {"n_rollouts": 3}})
    submit_group(pool, "g", [0.0, 1.0])
    about = {"trajectory_uid": "cut", "prompt_uid": "g", "is_last": True}
    pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], reward=0.5, finish_reason="length", **about)])
    found = examples_of(groups(pool), AlgorithmConfig.model_validate({"filters": ["overlong"]}))
    assert found.filtered == {"overlong": 1}
    assert {one.trajectory_uid for one in found.sequences} == {"g-0", "g-1"}


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (80, 0.0), (85, 0.5), (90, 1.0), (100, 2.0), (500, 2.0)])
def test_the_penalty_grows_evenly_over_the_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, OverlongConfig(max_tokens=100, buffer=20, penalty=2.0)) == pytest.approx(penalty)


@pytest.mark.parametrize("process", [True, False])
def test_a_long_answer_is_compared_with_a_lower_reward_and_told_with_its_own(process: bool) -> None:
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    for uid, length in (("short", 2), ("long", 8)):
        about = {"trajectory_uid": uid, "prompt_uid": "g", "is_last": True}
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2] * length, reward=1.0, **about)])
    config = AlgorithmConfig.model_validate(
        {"advantage": "rloo", "process_rewards": process, "overlong": {"max_tokens": 8, "buffer": 4, "penalty": 0.5}}
    )
    found = examples_of(groups(pool), config)
    assert found.rewards == [1.0, 1.0]
    assert found.penalised == 1
    assert {one.trajectory_uid: float(one.advantages[-1]) for one in found.sequences if one.advantages is not None} == {
        "short": 0.5,
        "long": -0.5,
    }


def unrewarded() -> DataPool:
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    for uid, reward in (("good", 1.0), ("unknown", None)):
        about = {"trajectory_uid": uid, "prompt_uid": "g", "is_last": True, "sampling": {"temperature": 0.5}}
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2, 3], reward=reward, **about)])
    return pool


@pytest.mark.parametrize("given", [{"loss": "sft"}, {"advantage": "none"}])
def test_what_needs_no_reward_learns_from_all(given: dict[str, Any]) -> None:
    found = examples_of(groups(unrewarded()), AlgorithmConfig.model_validate(given))
    assert (len(found.sequences), found.skipped.unrewarded, found.skipped.zero_variance) == (2, 0, 0)
    assert (found.rewards, found.trajectories) == ([1.0], 2)


def test_sft_is_of_the_model_at_temperature_1_and_of_what_was_good_where_that_is_asked_for() -> None:
    config = AlgorithmConfig.model_validate({"loss": "sft", "filters": [{"use": "min_reward", "at_least": 0.5}]})
    found = examples_of(groups(unrewarded()), config)
    (one,) = found.sequences
    assert one.trajectory_uid == "good"
    assert [span.temperature for span in one.spans] == [1.0]
    assert found.filtered == {"min_reward": 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "gpso"}, r"'gpso' is no loss; did you mean gspo\?.*ppo, tis, gspo, cispo, sft, or FILE\.py:FUNCTION"),
        ({"advantage": "my.py"}, "is no advantage"),
        ({"filters": ["overlng"]}, "did you mean overlong"),
        ({"loss": "sft", "advantage": "gae"}, "leave out advantage: gae"),
        ({"loss": "sft", "old": "proximal"}, "leave out old: proximal"),
        ({"loss": "sft", "teacher": {}}, "leave out teacher"),
        ({"loss": "sft", "overlong": {"max_tokens": 9, "buffer": 3}}, "leave out overlong"),
        ({"advantage": "none", "overlong": {"max_tokens": 9, "buffer": 3}}, "compares no rewards"),
        ({"overlong": {"max_tokens": 9, "buffer": 30}}, "at most 9"),
        ({"advantage": "gae", "teacher": {}}, "a critic knows no teacher"),
        ({"kl": 0.1, "teacher": {}}, "set kl: 0"),
        ({"teacher": {"address": "teacher:80"}}, "no server's address"),
        ({"loss_options": {"x": 1}}, "loss is ppo: leave them out"),
        ({"advantage_options": {"x": 1}}, "advantage is grpo: leave them out"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_fix(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlgorithmConfig.model_validate(given)
