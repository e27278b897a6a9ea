"""The whole demo, on the small game: it learns, it tells, and it outlives what is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.data.errors import InvalidInput
from headrace.demo.run import Options, play
from headrace.pool.readonly import JournalView

KEYS = ["task", "steps", "reward_start", "reward_end", "seconds", "calls", "staleness_mean", "logprob_gap_max"]


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows that are written to their end: the trainer may be at another."""
    lines = (run / "trainer" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def mean(rows: list[dict[str, Any]]) -> float:
    return sum(row["reward"] for row in rows) / len(rows)


def ledger(run: Path) -> dict[str, Any]:
    with JournalView(run / "journal") as view:
        stats = view.stats("train")
    assert stats["balanced"]
    found: dict[str, Any] = stats["ledger"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agents_learn_the_small_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    learned = play(Options(task="number3", steps=30), run)
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = metrics(run)
    assert list(verdict) == [*KEYS, "report"]
    assert verdict["steps"] == len(rows) == 30
    assert learned is (verdict["reward_end"] >= 0.95)
    assert mean(rows[:5]) < 0.3 < 0.5 < mean(rows[-5:])
    assert verdict["staleness_mean"] <= 2
    assert verdict["logprob_gap_max"] < 1e-3
    assert max(row["on_policy_gap"] for row in rows if row.get("on_policy_gap") is not None) < 1e-3
    assert ledger(run)["consumed"] == sum(row["sequences"] and row["tokens"] for row in rows)
    page = (run / "report.html").read_text()
    for part in ("<svg", "before: ", "after: ", "seconds of CPU"):
        assert part in page
    assert (run / "reward.png").read_bytes()[:4] == b"\x89PNG"


@contextmanager
def started(run: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "headrace", "demo", "--task", "number3", "--steps", "24", "--run", str(run), *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate()


def until_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    while not (run / "trainer" / "metrics.jsonl").exists() or len(metrics(run)) < step:
        assert process.poll() is None, process.communicate()
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            pass


def kill(process: subprocess.Popen[str], run: Path, command: str, after: int) -> None:
    """kill -9 for one of the demo's processes, once the trainer has made so many steps."""
    until_step(process, run, after)
    (victim,) = [child for child in psutil.Process(process.pid).children() if command in child.cmdline()]
    os.kill(victim.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_goes_on_after_anything_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for command, name, after in (("train", "trainer", 4), ("serve", "gateway", 8), ("engine", "engine", 12)):
        with started(run, *(["--resume"] if run.exists() else [])) as process:
            kill(process, run, command, after)
            _, said = process.communicate(timeout=800)
        assert process.returncode == 1
        assert f"{name} was ended by SIGKILL" in said
        assert f"--resume --run {run}" in said
    with started(run, "--resume") as process:
        out, said = process.communicate(timeout=800)
    verdict = json.loads(out.splitlines()[-1])
    rows = metrics(run)
    assert verdict["steps"] == len(rows) == 24, said
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert all(after["version"] > before["version"] for before, after in pairwise(rows))
    # A call is a step of one token: what was learned from is what was consumed, to the token, so nothing was twice.
    assert ledger(run)["consumed"] == sum(row["tokens"] for row in rows)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_ray_a_run_goes_on_after_the_pools_actor_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(run, "--ray") as process:
        until_step(process, run, 4)
        (victim,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.name().startswith("ray::PoolActor") or "ray::PoolActor" in " ".join(child.cmdline())
        ]
        os.kill(victim.pid, signal.SIGKILL)
        out, said = process.communicate(timeout=800)
    if process.returncode != 0 and not out.splitlines()[-1].startswith("{"):
        with started(run, "--resume", "--ray") as process:
            out, said = process.communicate(timeout=800)
    verdict = json.loads(out.splitlines()[-1])
    rows = metrics(run)
    assert verdict["steps"] == len(rows) == 24, said
    assert mean(rows[:5]) < mean(rows[-5:])
    assert ledger(run)["consumed"] == sum(row["tokens"] for row in rows)


def test_a_folder_with_something_in_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        play(Options(), tmp_path)


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no demo"):
        play(Options(), tmp_path, resume=True)


def test_an_unknown_task_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="number, number3"):
        play(Options(task="chess"), tmp_path / "run")


@pytest.mark.parametrize("wrong", [{"engine": "vllm"}, {"vllm_addresses": "http://127.0.0.1:1"}])
def test_vllm_and_its_addresses_go_together(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="go together"):
        play(Options(**wrong), tmp_path / "run")
