"""Projects of `headrace new`: of every kind, they are complete, run as they are, and learn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.dashboard.test_single_file import answers_of
from tests.run.runs import RUN_S, ledger, mean, metrics, processes_of, result, started

from headrace.data.errors import InvalidInput
from headrace.run.new import KINDS, Kind, create

pytestmark = pytest.mark.system

GROUPS, ROLLOUTS = 8, 8
#: Enough for a run to be whole: it samples, scores, learns and evaluates before, between and after.
FEW = 2
#: Enough to rise by twice `RISE`, and no more: a command is a process for each rollout. Environments score their own
#: groups and take longer to learn; held-out rows, which the agent's run plays, rise after those that are learned from.
STEPS: dict[Kind, int] = {"agent": 24, "command": 16, "flow": 16, "environment": 24}
#: What the mean reward of five steps must rise. Of 64 answers with a chance of one in seven, that of five steps has a
#: standard deviation of 0.02: ten of those.
RISE = 0.2


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_project_has_its_parts_and_its_test_passes(project: Callable[[Kind], Path], kind: Kind) -> None:
    folder = project(kind)
    assert {KINDS[kind][0], "reward.py", "run.yaml", "train.jsonl", "val.jsonl", "model", "README.md"} <= {
        path.name for path in folder.iterdir()
    }
    rows = [json.loads(line) for name in ("train", "val") for line in (folder / f"{name}.jsonl").open()]
    assert len(rows) == 20
    texts = [path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".yaml", ".md")]
    assert not any(re.search("@[A-Z]+@", text) for text in texts)
    if kind == "agent":  # the test is the same for all
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match="is not empty"):
        create(tmp_path, "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
def test_a_project_runs_as_it_is(project: Callable[[Kind], Path]) -> None:
    run(project("agent"), "agent", FEW)  # of the other kinds, test_command and test_environment play rollouts


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_project_learns(project: Callable[[Kind], Path], kind: Kind) -> None:
    folder = project(kind)
    told, rows = run(folder, kind, STEPS[kind])
    assert mean(rows[-5:]) - mean(rows[:5]) > RISE, [row["reward"] for row in rows]
    assert told["reward_end"] > told["reward_start"]
    if kind == "environment":
        assert told["held_out_end"] > told["held_out_start"]
    if kind == "agent":
        assert told["held_out_end"] > told["held_out_start"] + RISE


def run(folder: Path, kind: Kind, steps: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs a project for so many steps: exactly what was asked for is sampled, scored, learned from and evaluated. What
    the run told, and its rows."""
    quick = ("--set", f"train.steps={steps}")
    if kind not in ("agent", "environment"):
        quick += ("--set", "data.val=null")
    with started(folder, *quick) as process:
        told = result(process)
    rows = metrics(folder)
    assert len(rows) == told["steps"] == steps
    shown = answers_of(Path(told["report"]).read_text())
    assert len(shown["curves"]["reward"]["step"]) == steps
    assert processes_of(folder) == []
    # Exactly the rollouts that were asked for, each scored and each learned from.
    assert sum(row["trajectories"] for row in rows) == steps * GROUPS * ROLLOUTS
    assert ledger(folder, "train")["consumed"] == steps * GROUPS * ROLLOUTS
    assert told["staleness_mean"] <= 1
    if kind == "environment":
        assert None not in (told["held_out_start"], told["held_out_end"])
        # What it sampled is in the groups that it sent, and nowhere else.
        assert ledger(folder, "envs")["submitted"] == 0
    if kind == "agent":
        results = [json.loads(path.read_text()) for path in (folder / "RUN" / "evaluations").iterdir()]
        assert ledger(folder, "val")["consumed"] == len(results) * 16
        assert {one["step"] for one in results} >= {0, steps}, "before, after, and between as the machine's pace allows"
        assert all(one["rollouts"] == 16 and not one["failed"] for one in results)
    return told, rows
