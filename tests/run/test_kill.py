"""Whatever is killed under load, the run completes; nothing that was acknowledged is lost, nothing is trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from tests.run.runs import RUN_S, ledger, metrics, processes_of, result, started, until_step

from headrace.run.new import Kind

pytestmark = pytest.mark.system

GROUPS, ROLLOUTS = 8, 8
#: Which process is killed after which step, by a word of its command line.
KILLS = {1: "reward", 2: "rollout", 4: "gateway", 5: "train", 7: "engine"}
#: After which step the runner itself is.
RUNNER_KILLED = 9


def kill(process: subprocess.Popen[str], word: str) -> None:
    """kill -9 for a child of the run, by the subcommand that it is."""
    (victim,) = [
        child for child in psutil.Process(process.pid).children() if command_of(child)[1:4] == ["-m", "headrace", word]
    ]
    os.kill(victim.pid, signal.SIGKILL)


def command_of(child: psutil.Process) -> list[str]:
    """A child's command line; none where it has ended, which its parent may not have noticed yet."""
    try:
        found: list[str] = child.cmdline()
    except psutil.NoSuchProcess:
        return []
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_a_run_completes_whatever_is_killed(project: Callable[[Kind], Path]) -> None:
    folder = project("agent")
    changes = ("--set", "data.val=null", "--set", "train.checkpoint.every=3")
    with started(folder, *changes, "--set", "train.steps=10000") as process:  # it has not ended when it is killed
        for step, word in KILLS.items():
            until_step(process, folder, step)
            kill(process, word)
        until_step(process, folder, RUNNER_KILLED)
        orphans = processes_of(folder)
        assert len(orphans) >= 5
        process.kill()
        process.communicate()
    steps = len(metrics(folder)) + 4
    with started(folder, *changes, "--set", f"train.steps={steps}", "--resume") as process:
        told = result(process)
    assert psutil.wait_procs(orphans, timeout=300)[1] == []
    assert processes_of(folder) == []
    rows = metrics(folder)
    assert told["steps"] == steps
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(after["version"] > before["version"] for before, after in pairwise(rows))
    # A rollout is one call of one token: what was learned from is what was consumed, to the token: nothing twice.
    learned = steps * GROUPS * ROLLOUTS
    assert sum(row["tokens"] for row in rows) == ledger(folder, "train")["consumed"] == learned
