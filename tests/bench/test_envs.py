"""The environments' benchmark: every side makes every rollout, at a size that takes a moment."""

from __future__ import annotations

from headrace.bench.envs.measure import RolloutLoad, measure_load


def test_serve_and_process_are_measured_against_the_same_rollouts() -> None:
    found = measure_load(RolloutLoad(rollouts=32, rounds=1, rollout_s=0.001)).as_dict()
    absolute = found["absolute"]
    assert found["overhead_vs_gather"] > 0
    assert found["process_parallel"] > 0
    assert set(absolute) == {"serve_rollouts_s", "gather_rollouts_s", "process_rollouts_s"}
    assert all(value > 0 for value in absolute.values())
