"""What is shown of one trajectory, of groups and of a run's metrics."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests.dashboard.test_follow import submit, sweep

from headrace import DataPool, Step
from headrace.dashboard.detail import conversation, detail, step_tokens
from headrace.dashboard.figures import LedgerRates, MetricsFile, group_record, survivors, waits
from headrace.dashboard.follow import PoolFollower
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.records import TrajectoryRecord
from headrace.dashboard.source import RunningPool
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import NotFound


def test_a_step_shows_each_tokens_log_prob_mask_and_version() -> None:
    with DataPool() as pool:
        pool.submit_steps(
            [
                Step(
                    prompt_ids=[1, 2, 3],
                    response_ids=[7, 8, 9],
                    rollout_log_probs=[-0.5, -1.0, -1.5],
                    trajectory_uid="t",
                    step_index=0,
                    policy_version=4,
                    version_spans=((0, 4), (2, 5)),
                )
            ]
        )
        found = step_tokens(pool.trajectory("t"), 0, 0, 100, None)
    assert found.ids == [1, 2, 3, 7, 8, 9]
    assert found.text is None
    assert found.log_probs == [None, None, None, -0.5, -1.0, -1.5]
    assert found.trained == [False, False, False, True, True, True]
    assert found.versions == [-1, -1, -1, 4, 4, 5]


def test_whole_numbers_that_a_browser_would_change_are_text() -> None:
    with DataPool() as pool:
        pool.open("t", "p", metadata={"seed": 2**53 + 1, "least": -(2**53), "in": [{"id": 2**63}], "yes": True})
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", prompt_uid="p")])
        shown = detail(pool.trajectory("t")).metadata
    assert shown == {"seed": str(2**53 + 1), "least": -(2**53), "in": [{"id": str(2**63)}], "yes": True}


def test_branches_and_pages_of_steps() -> None:
    with DataPool() as pool:
        pool.submit_steps(
            [
                Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", step_index=0),
                Step(prompt_ids=[1, 2, 3], response_ids=[4], trajectory_uid="t", step_index=1),
                Step(prompt_ids=[1, 2, 5], response_ids=[6], trajectory_uid="t", step_index=2),
            ]
        )
        found = detail(pool.trajectory("t"), offset=1, limit=1)
        assert (found.total_steps, found.leaves) == (3, [1, 2])
        assert [(step.step_index, step.parent) for step in found.steps] == [(1, 0)]
        with pytest.raises(NotFound, match="has no step 9"):
            step_tokens(pool.trajectory("t"), 9, 0, 10, None)
        assert conversation(pool.trajectory("t"), 1, None).why_none == "no tokenizer is known here"


def test_a_group_says_what_it_waits_for() -> None:
    with DataPool(defaults={"n_rollouts": 3}) as pool:
        submit(pool, 0, rollouts=2, ended=False)
        index = TrajectoryIndex()
        follower = PoolFollower(RunningPool(pool, "here"), index)
        sweep(follower)
        found = group_record(index.group(DEFAULT_CHANNEL, "g0"), follower.group_row(DEFAULT_CHANNEL, "g0"))
        assert found.waits_for == "1 of 3 trajectories have not begun; 2 trajectories not ended"
        assert waits(pool.stats()["channels"], [])[0].endswith("the trainer waits for agents.")


def test_survivors_warn_where_the_long_ones_are_lost() -> None:
    index = TrajectoryIndex()
    for number in range(100):
        long = number % 2 == 1
        state = "stale" if long and number % 4 == 1 else "consumed"
        index.put(TrajectoryRecord(f"t{number}", "p", "default", state=state, steps=1, tokens=500 if long else 5))
    for number in range(30):
        index.put(TrajectoryRecord(f"o{number}", "p", "other", state="timeout", steps=2))
    by_tokens, by_turns, by_reward, by_channel = survivors(index)
    assert [(row.label, row.share) for row in by_channel.rows] == [("default", 0.75), ("other", 0.0)]
    assert by_channel.warning is not None
    assert [(row.label, row.known, row.consumed, row.dropped) for row in by_tokens.rows] == [
        ("0", 30, 0, 30),
        ("4 to 7", 50, 50, 0),
        ("256 to 511", 50, 25, 25),
    ]
    assert by_tokens.warning is not None
    assert "0% of 0 were trained on, and 100% of 4 to 7" in by_tokens.warning
    assert by_turns.warning is not None
    assert by_reward.rows == []


def test_metrics_are_read_as_they_grow_and_anew_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert not metrics.refresh()
    assert metrics.curves() == {}
    line = [orjson.dumps({"step": step, "reward": step / 10, "times": {"wait": 1.0}}) + b"\n" for step in range(4)]
    path.write_bytes(line[0] + line[1][:5])
    metrics.refresh()
    assert metrics.curves() == {"reward": {"step": [0], "reward": [0.0]}}
    path.write_bytes(b"".join(line[:3]))
    metrics.refresh()
    assert metrics.curves()["reward"]["step"] == [0, 1, 2]
    path.write_bytes(line[0])
    metrics.refresh()
    assert metrics.curves()["reward"]["step"] == [0]


def test_rates_are_those_of_the_last_minute() -> None:
    rates = LedgerRates()
    rates.add(0.0, {"submitted": 0, "consumed": 0})
    assert rates.add(10.0, {"submitted": 100, "consumed": 50}) == {"submitted": 10.0, "consumed": 5.0}
    for at in (60.0, 70.0):
        rates.add(at, {"submitted": 100, "consumed": 50})
    assert rates.add(120.0, {"submitted": 100, "consumed": 50}) == {"submitted": 0.0, "consumed": 0.0}
