"""The whole demo, on the small game: it learns, it tells, and it outlives what is killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console
from tests.dashboard.test_single_file import answers_of
from tests.run.runs import headrace

from headrace.dashboard.about import About
from headrace.data.errors import InvalidInput
from headrace.demo import progress
from headrace.demo.progress import FirstAndLast, GameRecords
from headrace.demo.recipe import RECIPES
from headrace.demo.run import (
    STATE_FILE,
    DemoOptions,
    DemoRun,
    DemoState,
    play,
)
from headrace.demo.services import DemoSettings
from headrace.pool.readonly import JournalView

pytestmark = pytest.mark.system

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
    learned = play(DemoOptions(task="number3", steps=24), run)
    told = capsys.readouterr().out.splitlines()
    verdict = json.loads(told[-1])
    rows = metrics(run)
    assert list(verdict) == [*KEYS, "report"]
    assert verdict["steps"] == len(rows) == 24
    assert learned is (verdict["reward_end"] >= 0.95)
    assert mean(rows[:5]) < 0.3 < 0.5 < mean(rows[-5:])
    assert verdict["staleness_mean"] <= 2
    assert verdict["logprob_gap_max"] < 1e-3
    assert max(row["on_policy_gap"] for row in rows if row.get("on_policy_gap") is not None) < 1e-3
    assert ledger(run)["consumed"] == sum(row["sequences"] and row["tokens"] for row in rows)
    answers = answers_of((run / "report.html").read_text())
    about = msgspec.convert(answers["about"], About)
    assert about.outcome.startswith("Learned" if learned else "Not learned yet")
    said = msgspec.json.encode(about).decode()
    for part in ("from 1 to 3", "binary search", "before: ", "after: ", "seconds of CPU", str(run / "journal")):
        assert part in said
    assert len(answers["curves"]["reward"]["step"]) == 24
    assert answers["overview"]["ledger"]["consumed"] == ledger(run)["consumed"]
    assert any(talk["conversations"] for talk in answers["whole"].values())
    for process in ("model", "engine", "gateway", "trainer", "agents"):
        assert [line for line in told if f" s  {process} " in line], process
    assert any(str(run / "report.html") in line for line in told[:-1])
    assert any(line.rstrip().endswith("/dashboard") and " gateway " in line for line in told)
    assert any(f"headrace dashboard {run} " in line for line in told[:-1])
    # What the page shows of a last game is what the journal has of it.
    shown = msgspec.json.decode((run / progress.RECORDED_FILE).read_bytes(), type=FirstAndLast)
    assert shown.first is not None
    assert shown.last is not None
    with JournalView(run / "journal") as view:
        steps = view.trajectory(shown.last.trajectory_uid).steps
    assert [call.response_ids for call in shown.last.calls] == [step.response_ids.tolist() for step in steps]
    assert [call.log_probs for call in shown.last.calls] == [step.rollout_log_probs.tolist() for step in steps]
    assert {call.policy_version for call in shown.first.calls} == {0}
    for game in (shown.first, shown.last):
        assert all(len(call.response_ids) == len(call.log_probs) for call in game.calls)
        assert all(f"log-prob {log_prob:.3f}" in said for call in game.calls for log_prob in call.log_probs)
    assert (run / "reward.png").read_bytes()[:4] == b"\x89PNG"


@contextmanager
def started(run: Path, *args: str, steps: int = 8) -> Iterator[subprocess.Popen[str]]:
    with headrace("demo", "--task", "number3", "--run", str(run), "--steps", str(steps), *args) as process:
        yield process


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


@pytest.mark.timeout(900)
def test_ctrl_c_ends_every_process_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    with started(run) as process:
        while len(children := psutil.Process(process.pid).children()) < 2:  # engine and gateway
            assert process.poll() is None, process.communicate()
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out.splitlines()[-1] == f"Stopped after 0 steps. Go on with: headrace demo --resume --run '{run}'"
    assert psutil.wait_procs(children, timeout=300)[1] == []


#: Which processes are killed after which steps, by a word of their command lines, and how the demo calls them. The
#: first is enough to see a demo go on: with its engine its trainer begins again.
ONE = {1: ("engine", "engine")}
EACH = {1: ("train", "trainer"), 3: ("serve", "gateway"), 5: ("engine", "engine")}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [ONE, pytest.param(EACH, marks=pytest.mark.long)], ids=["one", "each"])
def test_a_run_goes_on_whatever_is_killed_and_is_resumed_when_the_demo_itself_is(
    tmp_path: Path, kills: dict[int, tuple[str, str]]
) -> None:
    run = tmp_path / "run"
    with started(run, steps=10**4) as process:  # it has not ended when it is killed, however late that is
        for after, (command, _) in kills.items():
            kill(process, run, command, after)
        until_step(process, run, max(kills) + 2)
        children = psutil.Process(process.pid).children()
        process.kill()
        told, _ = process.communicate()
    steps = len(metrics(run)) + 3
    for _, name in kills.values():
        assert [line for line in told.splitlines() if f" s  {name} " in line and "SIGKILL" in line], told
    with started(run, "--resume", steps=steps) as process:
        out, said = process.communicate(timeout=1500)
    assert psutil.wait_procs(children, timeout=300)[1] == []
    rows = metrics(run)
    assert json.loads(out.splitlines()[-1])["steps"] == len(rows) == steps, said
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(after["version"] > before["version"] for before, after in pairwise(rows))
    # A call is a step of one token: what was learned from is what was consumed, to the token, so nothing was twice.
    assert ledger(run)["consumed"] == sum(row["tokens"] for row in rows)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.long
def test_on_ray_a_run_goes_on_after_the_pools_actor_was_killed(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 24
    with started(run, "--ray", steps=steps) as process:
        until_step(process, run, 2)
        (victim,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.name().startswith("ray::PoolActor") or "ray::PoolActor" in " ".join(child.cmdline())
        ]
        os.kill(victim.pid, signal.SIGKILL)
        out, said = process.communicate(timeout=800)
    if process.returncode != 0 and not out.splitlines()[-1].startswith("{"):
        with started(run, "--resume", "--ray", steps=steps) as process:
            out, said = process.communicate(timeout=800)
    verdict = json.loads(out.splitlines()[-1])
    rows = metrics(run)
    assert verdict["steps"] == len(rows) == steps, said
    assert mean(rows[:5]) < mean(rows[-5:])
    assert ledger(run)["consumed"] == sum(row["tokens"] for row in rows)


def test_a_folder_with_something_in_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        play(DemoOptions(), tmp_path)


def test_a_run_that_is_not_there_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no demo"):
        play(DemoOptions(), tmp_path, resume=True)


def begun(run: Path, ended: int = 0, **settings: Any) -> DemoSettings:
    """A run that was begun, with so many steps made where its trainer has ended."""
    settled = DemoSettings(task="number3", recipe=RECIPES["number3"], **{"steps": 3, **settings})
    (run / "trainer").mkdir(parents=True)
    DemoState(settled, ended=ended).write(run)
    return settled


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than eight bytes meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    settled = begun(tmp_path, ended=3)
    GameRecords(tmp_path, settled.seed).keep_last("http://127.0.0.1:1")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        DemoState(settled, seconds=9.0).write(tmp_path)
    with full_disk(), pytest.raises(OSError, match="File too large"):
        GameRecords(tmp_path, settled.seed).keep_last("http://127.0.0.1:1")
    with pytest.raises(InvalidInput, match="has made its 3 steps"):
        play(DemoOptions(), tmp_path, resume=True)
    assert GameRecords(tmp_path, settled.seed).games == FirstAndLast()


@pytest.mark.parametrize("name", [STATE_FILE, progress.RECORDED_FILE])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    begun(tmp_path)
    (tmp_path / name).write_bytes(b'{"settings": ')
    with pytest.raises(InvalidInput, match=f"{name} cannot be read: "):
        play(DemoOptions(), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"seed": 99}, "has --seed 7, not 99"),
        ({"task": "number"}, "has --task number3, not number"),
        ({"engine": "vllm", "vllm_addresses": "http://127.0.0.1:1"}, "has --engine headrace, not vllm"),
        ({"model": "elsewhere"}, "has no --model, not elsewhere"),
        ({"ray": True}, "has no --ray, not True"),
    ],
)
def test_a_run_is_not_resumed_as_another(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    begun(tmp_path, seed=7)
    with pytest.raises(InvalidInput, match=said) as error:
        play(DemoOptions(**asked), tmp_path, resume=True)
    assert f"headrace demo --resume --run {tmp_path}" in str(error.value)


def test_a_run_with_the_seed_0_is_not_resumed_with_another(tmp_path: Path) -> None:
    begun(tmp_path, seed=0)
    with pytest.raises(InvalidInput, match="has --seed 0, not 99"):
        play(DemoOptions(seed=99), tmp_path, resume=True)


def test_a_run_that_made_all_its_steps_goes_on_with_more_only(tmp_path: Path) -> None:
    begun(tmp_path, ended=3)
    with pytest.raises(InvalidInput, match=f"has made its 3 steps.*--run {tmp_path} --steps 200"):
        play(DemoOptions(), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("rewards", "most", "first", "next_"),
    [
        ([0.12] * 3, 3, "3 steps were not enough: reward 0.12 of 0.95", "--steps 200"),
        ([0.12] * 200, 200, "200 steps were not enough: reward 0.12 of 0.95", "--steps 400"),
        ([0.12] * 3, 50, "The trainer ended after 3 of 50 steps: reward 0.12 of 0.95", "--resume"),
        ([0.97] * 12, 50, "Learned: reward 0.970", "headrace demo --seed 1"),
    ],
)
def test_the_end_says_what_it_came_to_and_what_comes_next(
    tmp_path: Path, rewards: list[float], most: int, first: str, next_: str
) -> None:
    settled = begun(tmp_path, steps=most)
    rows = "".join(json.dumps({"reward": reward}) + "\n" for reward in rewards)
    (tmp_path / "trainer" / "metrics.jsonl").write_text(rows)
    demo = DemoRun(settled, tmp_path, Console())
    demo.progress.refresh()
    lines = demo.closing(demo.verdict(seconds=9.0), tmp_path / "report.html")
    assert lines[0].startswith(first)
    assert next_ in " ".join(lines)
    assert any(str(tmp_path / "report.html") in line for line in lines)
    assert any(f"headrace dashboard {tmp_path} " in line for line in lines)


def test_an_unknown_task_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="number, number3"):
        play(DemoOptions(task="chess"), tmp_path / "run")


@pytest.mark.parametrize("wrong", [{"engine": "vllm"}, {"vllm_addresses": "http://127.0.0.1:1"}])
def test_vllm_and_its_addresses_go_together(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="go together"):
        play(DemoOptions(**wrong), tmp_path / "run")
