"""What an evaluation comes to: means, pass@k, by a field; what failed is counted and is no zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.run.results import EvaluatedRollout, pass_rates, read_results, summary, write


def rollout(row: int, at: int, reward: float | None, **by: str) -> EvaluatedRollout:
    return EvaluatedRollout(row, at, f"{row}-{at}", reward, None if reward is not None else "crashed", by=by)


def test_pass_at_k_is_without_bias() -> None:
    passed = {0: (1, 0, 0, 0), 1: (1, 1, 0, 0), 2: (0, 0, 0, 0)}
    played = [rollout(row, at, float(reward)) for row, rewards in passed.items() for at, reward in enumerate(rewards)]
    rates = pass_rates(played, 4, 1.0)
    # By hand: of 6 pairs of a row's four, with one passed 3 have it, with two passed 5 have one.
    assert list(rates) == [1, 2, 4]
    assert rates[1] == pytest.approx((1 / 4 + 2 / 4) / 3)
    assert rates[2] == pytest.approx((3 / 6 + 5 / 6) / 3)
    assert rates[4] == pytest.approx(2 / 3)


def test_a_row_with_too_few_scored_rollouts_does_not_count_for_larger_k() -> None:
    played = [rollout(0, 0, 1.0), rollout(1, 0, 0.0), rollout(1, 1, 1.0)]
    assert pass_rates(played, 2, 1.0) == {1: pytest.approx(0.75), 2: pytest.approx(1.0)}


def test_what_failed_is_counted_and_is_no_zero() -> None:
    played = [rollout(0, 0, 1.0, kind="a"), rollout(0, 1, None, kind="a"), rollout(1, 0, 0.5, kind="b")]
    found = summary("x", 3, played, rollouts=2, pass_reward=1.0, seconds=1.0)
    assert (found.rows, found.rollouts, found.failed, found.mean) == (2, 3, 1, 0.75)
    assert found.by == {"kind": {"a": 1.0, "b": 0.5}}


def test_an_evaluation_in_which_all_failed_has_no_mean() -> None:
    assert summary("x", 0, [rollout(0, 0, None)], rollouts=1, pass_reward=1.0, seconds=1.0).mean is None


def test_results_are_read_again_by_their_steps(tmp_path: Path) -> None:
    found = [summary("x", step, [rollout(0, 0, 1.0)], rollouts=1, pass_reward=1.0, seconds=1.0) for step in (20, 0, 3)]
    for one in found:
        write(one, tmp_path / f"step-{one.step}.json")
    assert [one.step for one in read_results(tmp_path)] == [0, 3, 20]
    assert read_results(tmp_path)[2] == found[0]
