"""Advantages, against their formulas written out with fractions of plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.errors import InvalidInput
from headrace.trainer.advantages import EPS, gae, group_advantages

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=9)
batches = st.lists(rewards, min_size=1, max_size=5)


@given(batches)
def test_grpo_is_the_distance_from_the_groups_mean_in_sample_deviations(batch: list[list[float]]) -> None:
    for group, found in zip(batch, group_advantages(batch, "grpo"), strict=True):
        mean, spread = statistics.fmean(group), statistics.stdev(group)
        assert found.tolist() == pytest.approx([(r - mean) / (spread + EPS) for r in group], abs=1e-6)


@given(batches)
def test_dr_grpo_divides_by_nothing(batch: list[list[float]]) -> None:
    for group, found in zip(batch, group_advantages(batch, "dr_grpo"), strict=True):
        assert found.tolist() == pytest.approx([r - statistics.fmean(group) for r in group], abs=1e-9)


@given(batches)
def test_rloo_compares_each_with_the_others(batch: list[list[float]]) -> None:
    for group, found in zip(batch, group_advantages(batch, "rloo"), strict=True):
        others = [statistics.fmean(group[:at] + group[at + 1 :]) for at in range(len(group))]
        assert found.tolist() == pytest.approx([r - o for r, o in zip(group, others, strict=True)], abs=1e-9)


@given(batches)
def test_reinforce_compares_with_the_whole_batch(batch: list[list[float]]) -> None:
    mean = statistics.fmean(r for group in batch for r in group)
    for group, found in zip(batch, group_advantages(batch, "reinforce"), strict=True):
        assert found.tolist() == pytest.approx([r - mean for r in group], abs=1e-9)


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_is_compared_with_the_batch(how: str) -> None:
    batch = [[1.0], [0.0, 2.0], [4.0]]
    found = group_advantages(batch, how)
    (everyone,) = group_advantages([[1.0, 0.0, 2.0, 4.0]], how)
    assert found[0][0] == everyone[0]
    assert found[2][0] == everyone[3]
    assert found[1].tolist() == group_advantages([[0.0, 2.0]], how)[0].tolist()


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_one_trajectory_alone_teaches_nothing(how: str) -> None:
    assert group_advantages([[3.0]], how)[0].tolist() == [0.0]


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_zero(how: str) -> None:
    assert not group_advantages([[0.1] * 7], how)[0].any()


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"gpro.*grpo, dr_grpo"):
        group_advantages([[1.0, 2.0]], "gpro")


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_is_the_discounted_sum_of_the_errors_ahead(
    pairs: list[tuple[float, float]], gamma: float, lam: float
) -> None:
    earned, values = [r for r, _ in pairs], [v for _, v in pairs]
    n = len(pairs)
    errors = [earned[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    wanted = [math.fsum((gamma * lam) ** (k - t) * errors[k] for k in range(t, n)) for t in range(n)]
    advantages, returns = gae(np.array(earned), np.array(values), gamma, lam)
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-9)
    assert returns.tolist() == pytest.approx([w + v for w, v in zip(wanted, values, strict=True)], abs=1e-9)
