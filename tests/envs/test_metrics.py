"""An environment's metrics: what a row tells, where it goes, and that it never stands in the work's way."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.envs.kit import CountingEnv, rollout

from headrace.data.errors import HeadraceError
from headrace.envs import BaseEnvConfig
from headrace.envs.metrics import MetricsLog, Performance, length_metrics
from headrace.extras import install_command
from headrace.metrics import Table


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(**fields: Any) -> CountingEnv:
    return CountingEnv(BaseEnvConfig(group_size=2, use_wandb=False, **fields))


def group(*scores: float) -> Any:
    one = rollout(1, 0)
    said = [[{"role": "assistant", "content": f"said {score:g}"}] for score in scores]
    return {"tokens": [one["tokens"]] * len(scores), "masks": [], "scores": list(scores), "messages": said}


async def test_a_row_tells_of_lengths_durations_scores_and_rollouts_and_begins_anew(tmp_path: Path) -> None:
    env = made(metrics_path=str(tmp_path / "m.jsonl"), num_rollouts_per_group_for_logging=-1)
    env.completion_lengths, env.max_token_len = [10, 100], 100
    env.task_duration, env.succeeded_task_duration = [1.0, 3.0], [1.0, 3.0]
    env.counts.groups, env.counts.sequences, env.counts.scores = 2, 4, 3.0
    await env.add_rollouts_for_wandb(group(0.0, 1.0))
    await env.wandb_log({"mine": 7})
    env.curr_step = 1
    await env.wandb_log()
    await env.close()
    first, second = rows(tmp_path / "m.jsonl")
    assert (first["step"], first["mine"], first["train/completion_lengths"]) == (0, 7, 55.0)
    assert (first["train/completion_lengths_max"], first["train/completion_lengths_p95"]) == (100, 0.5)
    assert (first["train_perf/task_duration_mean"], first["train/items_sent_to_api"]) == (2.0, 2)
    assert first["train/score_mean"] == 0.75
    assert first["train/rollouts"]["data"] == [["assistant: said 0", 0.0], ["assistant: said 1", 1.0]]
    assert second["step"] == 1
    assert not {"mine", "train/rollouts", "train/completion_lengths", "train/score_mean"} & second.keys()


async def test_rollouts_of_as_many_groups_are_kept_as_configured() -> None:
    env = made(num_rollouts_to_keep=2)
    for score in (0.0, 1.0, 2.0):
        await env.add_rollouts_for_wandb(group(score, 5.0))
    found = (await env.create_rollout_table({}))["train/rollouts"]
    assert isinstance(found, Table)
    assert [score for _, score in found.data] == [1.0, 2.0]
    await env.close()


class NoHub(CountingEnv):
    """An environment whose tokenizer is on a hub that is away."""

    asked = 0

    @cached_property
    def tokenizer(self) -> Any:
        self.asked += 1
        raise OSError("the hub is away")


async def test_a_tokenizer_that_cannot_be_had_is_asked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    env = NoHub(BaseEnvConfig(group_size=2, use_wandb=False))
    alone = group(0.0, 1.0) | {"messages": None}
    await asyncio.gather(*(env.add_rollouts_for_wandb(alone) for _ in range(3)))
    assert [rollouts[0] for rollouts in env.rollouts_for_wandb] == [("1 2 1", 0.0)] * 3
    assert env.asked == 1
    assert caplog.text.count("the hub is away") == 1
    await env.close()


def test_a_rate_is_of_the_time_since_the_last_row() -> None:
    now = [0.0]
    env, performance = made(), Performance(clock=lambda: now[0])
    now[0], env.counts.groups, env.counts.paused_s = 2.0, 6, 1.0
    found = performance.row(env.counts, 0, None)
    assert (found["train_perf/groups_per_s"], found["train_perf/paused_share"]) == (3.0, 0.5)
    now[0], env.counts.groups = 4.0, 7
    found = performance.row(env.counts, 0, None)
    assert (found["train_perf/groups_per_s"], found["train_perf/paused_share"]) == (0.5, 0.0)


def test_without_a_limit_no_share_of_long_completions_is_told() -> None:
    assert "train/completion_lengths_p95" not in length_metrics([3, 4], -1)
    assert length_metrics([], 10) == {}


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(None, str(tmp_path / "board"))
    log.write(4, {"train/score": 0.5}, {"server/free": 3}, "words_0")
    log.close()
    found = EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    (told,) = found.Scalars("train/score")
    assert (told.step, told.value) == (4, 0.5)


def test_without_tensorboard_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(HeadraceError, match=r"pip install .*\[tensorboard\]"):
        made(tensorboard_dir=str(tmp_path))


def test_in_wandb_own_metrics_have_the_environments_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = MagicMock()
    monkeypatch.setattr("headrace.envs.metrics.Wandb", wandb)
    log = MetricsLog(str(tmp_path / "m.jsonl"))
    log.open_wandb("tests", group="all", name="words_0", config={"seed": 1})
    log.write(4, {"train/score": 0.5}, {"server/free": 3}, "words_0")
    log.close()
    wandb.assert_called_once_with("tests", tmp_path, name="words_0", group="all", config={"seed": 1})
    wandb().write.assert_called_once_with({"step": 4, "words_0_train/score": 0.5, "server/free": 3})
    wandb().close.assert_called_once_with()
    assert rows(tmp_path / "m.jsonl")[0]["train/score"] == 0.5


def test_without_wandb_metrics_go_to_the_file_with_a_word_on_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log = MetricsLog(str(tmp_path / "m.jsonl"))
    log.open_wandb("tests", group=None, name=None, config={})
    log.write(0, {"x": 1}, {}, None)
    log.close()
    assert install_command("wandb") in caplog.text
    assert rows(tmp_path / "m.jsonl")[0]["x"] == 1


async def test_a_file_that_cannot_be_written_costs_the_row_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    env = made(metrics_path=str(tmp_path / "file" / "m.jsonl"))
    await env.wandb_log()
    await env.wandb_log()
    await env.close()
    assert caplog.text.count("metrics are not kept") == 1
