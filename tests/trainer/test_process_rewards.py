"""Advantages of steps by the rewards that each earned, against their formula in plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import pool_of
from tests.trainer.test_losses import batch_of, loss_of

from headrace import DataPool, Step
from headrace.trainer.advantages import EPS, group_advantages, step_advantages
from headrace.trainer.config import AlgorithmConfig
from headrace.trainer.examples import examples_of

HOW = ["grpo", "dr_grpo", "rloo", "reinforce"]
trajectories = st.lists(st.floats(-3, 3).map(lambda value: round(value, 3)), min_size=1, max_size=5)
groups = st.lists(trajectories, min_size=2, max_size=4)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def by_hand(among: list[list[float]], how: str) -> list[list[float]]:
    """The formula of `step_advantages` for trajectories that are compared with each other."""
    found = []
    for i, own in enumerate(among):
        row = []
        for k in range(len(own)):
            others = [other for j, other in enumerate(among) if how != "rloo" or j != i]
            got_there = [math.fsum(other[:k]) for other in others if len(other) > k]
            before = math.fsum(own[:k])
            expected = mean(got_there) if got_there else before
            row.append((math.fsum(own) - mean([math.fsum(other) for other in others])) - (before - expected))
        found.append(row)
    if how == "grpo":
        spread = math.sqrt(math.fsum(mean([d * d for d in row]) for row in found) / (len(among) - 1))
        found = [[d / (spread + EPS) for d in row] for row in found]
    return found


@pytest.mark.parametrize("how", HOW)
@given(batch=st.lists(groups, min_size=1, max_size=3))
def test_the_formula(how: str, batch: list[list[list[float]]]) -> None:
    found = step_advantages(batch, how)
    if how == "reinforce":
        everyone = [one for group in batch for one in group]
        assert [row.tolist() for group in found for row in group] == [
            pytest.approx(row, abs=1e-6) for row in by_hand(everyone, how)
        ]
        return
    for group, rows in zip(batch, found, strict=True):
        assert [row.tolist() for row in rows] == [pytest.approx(row, abs=1e-6) for row in by_hand(group, how)]


@pytest.mark.parametrize("how", HOW)
@given(batch=st.lists(groups, min_size=1, max_size=3))
def test_rewards_of_last_steps_alone_give_the_advantages_of_trajectories(
    how: str, batch: list[list[list[float]]]
) -> None:
    outcomes = [[[*[0.0] * (len(one) - 1), one[-1]] for one in group] for group in batch]
    whole = group_advantages([[one[-1] for one in group] for group in batch], how)
    for group, rows, wanted in zip(outcomes, step_advantages(outcomes, how), whole, strict=True):
        for one, row, advantage in zip(group, rows, wanted, strict=True):
            assert row.tolist() == pytest.approx([advantage] * len(one), abs=1e-6)


@pytest.mark.parametrize("how", HOW)
def test_the_same_rewards_at_the_same_steps_teach_nothing(how: str) -> None:
    assert not any(row.any() for row in step_advantages([[[0.3, 0.7, 0.9]] * 3], how)[0])


def test_a_longer_trajectory_is_as_much_better_at_each_of_its_steps() -> None:
    """A point a step: what everybody had earned by then makes no difference, and each counts once."""
    (rows,) = step_advantages([[[1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]], "dr_grpo")
    assert [row.tolist() for row in rows] == [[-1.0, -1.0], [1.0, 1.0, 1.0, 1.0]]


def test_a_group_of_one_is_compared_with_the_batch() -> None:
    batch = [[[1.0, 0.0]], [[0.0, 2.0], [1.0]]]
    assert (
        step_advantages(batch, "rloo")[0][0].tolist() == by_hand([one for group in batch for one in group], "rloo")[0]
    )


def steps(pool: DataPool, uid: str, rewards: list[float | None]) -> None:
    ids = [1]
    for index, reward in enumerate(rewards):
        answer = [2 + index, 20 + len(uid)]
        about = {"trajectory_uid": uid, "prompt_uid": "g", "step_index": index, "is_last": index == len(rewards) - 1}
        pool.submit_steps([Step(prompt_ids=list(ids), response_ids=answer, reward=reward, **about)])
        ids += [*answer, 9]


@pytest.mark.parametrize(("process", "wanted"), [(True, [[0.0, -1.0], [0.0, 1.0]]), (False, None)])
def test_each_steps_tokens_have_its_advantage(process: bool, wanted: list[list[float]] | None) -> None:
    """Both earned one: only at the second step one of them got more than the other."""
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    steps(pool, "early", [1.0, None])
    steps(pool, "later", [0.0, 1.0])
    batch = pool.fetch_batch(1, timeout=0)
    assert batch is not None
    found = examples_of(batch.groups, AlgorithmConfig(advantage="rloo", process_rewards=process))
    if wanted is None:
        assert found.skipped.zero_variance == 1
        return
    assert [
        [float(one.advantages[span.start]) for span in one.spans]
        for one in found.sequences
        if one.advantages is not None
    ] == wanted
    for one in found.sequences:
        assert one.advantages is not None
        assert not one.advantages[~one.loss_mask].any()
        assert all(len(set(one.advantages[span.start : span.end].tolist())) == 1 for span in one.spans)


def test_the_gradient_is_that_of_each_steps_own_advantage() -> None:
    """PPO's loss on the tokens of three steps against the sum in plain loops, and its gradient by differences."""
    (rows,) = step_advantages([[[0.3, 0.7], [0.9]]], "grpo")
    advantages = torch.tensor(np.repeat(np.concatenate(rows), 2))
    old = torch.linspace(-2.0, -0.5, 6, dtype=torch.float64)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    now = (old + torch.tensor([0.05, -0.05, 0.1, 0.02, -0.1, 0.0])).requires_grad_()

    def loss(at: list[float]) -> float:
        total = 0.0
        for t, value in enumerate(at):
            ratio, a = math.exp(value - float(old[t])), float(advantages[t])
            total -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / 6
        return total

    found = loss_of(batch_of(now, old, advantages, weights))
    assert float(found.detach()) == pytest.approx(loss(now.tolist()))
    found.backward()
    assert now.grad is not None
    for t in range(6):
        nudged = [now.tolist(), now.tolist()]
        nudged[0][t] -= 1e-6
        nudged[1][t] += 1e-6
        assert float(now.grad[t]) == pytest.approx((loss(nudged[1]) - loss(nudged[0])) / 2e-6, abs=1e-7)


def test_outcomes_alone_are_as_they_were() -> None:
    pool = pool_of([[0.0, 1.0]], turns=2)
    batch = pool.fetch_batch(1, timeout=0)
    assert batch is not None
    found = [examples_of(batch.groups, AlgorithmConfig(process_rewards=on)).sequences for on in (True, False)]
    for one, other in zip(*found, strict=True):
        assert one.advantages is not None
        assert other.advantages is not None
        assert one.advantages.tolist() == other.advantages.tolist()
