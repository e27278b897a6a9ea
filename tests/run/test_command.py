"""`headrace run` on the command line: one run at a time, Ctrl-C ends everything, a dry run shows one rollout."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.run.runs import RUN_S, activated, processes_of, started

from headrace.run.new import Kind

pytestmark = pytest.mark.system


def command(project: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "headrace", "run", str(project / "run.yaml"), *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=RUN_S, env=activated(**env))


@pytest.mark.timeout(RUN_S)
def test_one_run_at_a_time_and_ctrl_c_ends_every_process(project: Callable[[Kind], Path]) -> None:
    folder = project("agent")
    with started(folder, "--set", "reward=null") as process:
        while len(children := psutil.Process(process.pid).children()) < 2:  # engine and gateway
            assert process.poll() is None, process.communicate()
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                pass
        second = command(folder, "--set", "reward=null", "--resume", "--run-dir", str(folder / "RUN"))
        assert second.returncode == 2
        assert f"in use by another `headrace run` (process {process.pid})" in second.stderr
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=RUN_S)
    assert process.returncode == 130
    assert out.splitlines()[-1].startswith("Stopped after 0 steps. Go on with: headrace run ")
    assert out.splitlines()[-1].endswith(f"--resume --run-dir {folder / 'RUN'}")
    assert psutil.wait_procs(children, timeout=300)[1] == []
    assert processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
@pytest.mark.parametrize("kind", ["command", pytest.param("flow", marks=pytest.mark.long)])
def test_a_dry_run_tells_what_it_would_start_and_plays_one_rollout(project: Callable[[Kind], Path], kind: Kind) -> None:
    folder = project(kind)
    # A gateway that has keys is opened by those that the environment names: to calls, rewards, the pool.
    keys = {f"HEADRACE_{whose}_KEY": whose.lower() for whose in ("API", "REWARD", "ADMIN")}
    done = command(folder, "--dry-run", **keys)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    for name in ("engine", "gateway", "reward", "trainer", "rollouter"):
        assert any(line.split()[:2] == [name, "headrace"] for line in said), name
    assert any("'prompt': 'colour'" in line for line in said)
    assert any(line.split()[:1] == ["reward"] and "(score " in line for line in said)
    assert not (folder / "runs").exists()
    assert processes_of(folder) == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dry-run", "--evaluate"), "give one of them"),
        (("--set", "train.stepz=3"), "train.stepz is not known; did you mean steps?"),
        (("--resume",), "there is no run of run"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    project: Callable[[Kind], Path], args: tuple[str, ...], said: str
) -> None:
    done = command(project("agent"), "--set", "reward=null", *args)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
