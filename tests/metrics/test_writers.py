"""Metrics as JSON lines, in TensorBoard and in wandb: whole lines, no prompt, tables where they can be shown."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.metrics import (
    WANDB_VARIABLES,
    JsonLines,
    Table,
    Wandb,
    flat,
    logged_in,
)

ROW = {"step": 3, "reward": 0.5, "loss": None, "times": {"wait": 0.25}, "sync": {"mode": "keep", "hold_ms": 4}}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rows_parts_get_names_of_their_own_and_only_numbers_are_told() -> None:
    assert flat(ROW) == {"step": 3, "reward": 0.5, "times/wait": 0.25, "sync/hold_ms": 4}


def test_a_number_of_numpys_is_a_number() -> None:
    assert flat({"mean": np.float64(0.5), "most": np.int64(3), "many": np.zeros(2)}) == {"mean": 0.5, "most": 3}


def test_lines_hold_numbers_tables_and_what_has_no_json_form(tmp_path: Path) -> None:
    table = Table(["text", "score"])
    table.add_data("hello", 1.0)
    written = JsonLines(tmp_path / "m.jsonl")
    written.write({"step": 1, "mean": np.float32(0.5), "rollouts": table})
    written.write({"step": 2, "odd": len, "rollouts": table})
    written.close()
    shown = {"columns": ["text", "score"], "data": [["hello", 1.0]]}
    assert lines(tmp_path / "m.jsonl") == [
        {"step": 1, "mean": 0.5, "rollouts": shown},
        {"step": 2, "odd": "<built-in function len>", "rollouts": shown},
    ]


def test_a_table_refuses_a_row_of_another_width() -> None:
    with pytest.raises(ValueError, match="text, score"):
        Table(["text", "score"]).add_data("alone")


def test_a_line_that_a_killed_writer_left_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step":1}\n{"st')
    written = JsonLines(tmp_path / "m.jsonl")
    written.write({"step": 2})
    written.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_line_that_a_full_disk_cut_short_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = JsonLines(tmp_path / "m.jsonl")
    written.write({"step": 1})
    real, left = os.write, [4]

    def full(fd: int, data: Any) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room, left[0] = left[0], 0
        return real(fd, bytes(data)[:room])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            written.write({"step": 2})
    written.write({"step": 3})
    written.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 3}]


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a login to wandb."""
    for name in (*WANDB_VARIABLES, "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for patience in ("WANDB__SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):
        monkeypatch.setenv(patience, "240")
    return tmp_path


def test_without_a_login_a_run_is_kept_offline_with_a_warning(nobody: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace.metrics"):
        written = Wandb("headrace", nobody, name="words", group="all", config={"seed": 1})
    table = Table(["text", "score"])
    table.add_data("hello", 1.0)
    written.write({"step": 1, "mean": 0.5, "train/rollouts": table, "who": "me"})
    written.close()
    (kept,) = (nobody / "wandb").glob("offline-run-*")
    assert list(kept.glob("*.wandb"))
    assert list(kept.glob("files/media/table/train/*.table.json"))
    assert "no login here" in caplog.text


def test_a_login_is_found_where_wandb_looks_for_it(nobody: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not logged_in()
    (nobody / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert logged_in()
