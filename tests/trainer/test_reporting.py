"""What a run tells of its steps, beside the JSON lines: the real TensorBoard and the real wandb, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.trainer.config import LogConfig
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
