"""What a run tells of its steps, beside the JSON lines: the real TensorBoard and the real wandb, offline; and the relay
between workers of a cluster and who shows their run."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.trainer.config import LogConfig
from headrace.trainer.ray_train import RunRelay
from headrace.trainer.reporting import RunMetrics

ROW = {"step": 3, "reward": 0.5, "loss": None, "times": {"wait": 0.25}, "sync": {"mode": "keep", "hold_ms": 4}}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = RunMetrics(tmp_path, LogConfig(tensorboard=True), {})
    metrics.write(ROW)
    metrics.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (told,) = found.Scalars("times/wait")
    assert (told.step, told.value) == (3, 0.25)
    assert (tmp_path / "metrics.jsonl").exists()


def test_wandb_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for patience in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.setenv(patience, "240")
    metrics = RunMetrics(tmp_path, LogConfig(wandb="headrace"), {"seed": 1})
    metrics.write(ROW)
    metrics.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


async def test_a_relay_hands_each_report_out_once_in_order_and_keeps_none_that_was_read() -> None:
    relay = RunRelay()
    for at in range(3):
        await relay.report("step", (at,))
    assert await relay.reports(0) == [("step", (0,)), ("step", (1,)), ("step", (2,))]
    await relay.report("step", (3,))
    assert await relay.reports(3) == [("step", (3,))]
    assert await relay.reports(4) == []
    assert relay._reports == []


async def test_of_what_a_run_does_a_relay_keeps_the_last_that_nobody_has_read() -> None:
    relay = RunRelay()
    await relay.report("groups", ("1 of 2",))
    assert await relay.reports(0) == [("groups", ("1 of 2",))]
    for words in ("0 of 2", "1 of 2", "2 of 2"):
        await relay.report("groups", (words,))
    await relay.report("doing", ("learning",))
    await relay.report("step", (1,))
    await relay.report("step", (2,))
    found = await relay.reports(1)
    assert found == [("groups", ("2 of 2",)), ("doing", ("learning",)), ("step", (1,)), ("step", (2,))]
