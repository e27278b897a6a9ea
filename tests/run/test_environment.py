"""An environment in a run: a dry run plays a group of it, `--evaluate` has it evaluate a model, and what it leaves is
read as any other evaluation."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.engine.kit import Client, rollout_engine
from tests.run.runs import RUN_S, processes_of

from headrace.data.errors import HeadraceError
from headrace.envs.evaluation import Evaluation
from headrace.run.config import RunConfig, load
from headrace.run.dry_run import dry_run
from headrace.run.environment import read_evaluation
from headrace.run.evaluate import evaluate_run, table, untold
from headrace.run.new import create

pytestmark = pytest.mark.system

KEYS = {f"HEADRACE_{whose}_KEY": whose.lower() for whose in ("API", "REWARD", "ADMIN")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("environment") / "words"
    create(made, "environment")
    return made


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Client]:
    with rollout_engine(folder / "model", "model") as found:
        yield found


@pytest.fixture
def config(folder: Path, engine: Client) -> RunConfig:
    """The project's file, with a rollout server that runs already."""
    return load(folder / "run.yaml", [f"servers={{addresses: ['http://{engine.host}']}}"])


@pytest.fixture
def said() -> tuple[Console, Callable[[], str]]:
    text = io.StringIO()
    return Console(file=text, width=200), text.getvalue


def written(folder: Path) -> list[str]:
    """What is in a folder but for what Python compiled."""
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


@pytest.mark.timeout(RUN_S)
def test_a_dry_run_plays_one_group_and_shows_its_rewards(
    folder: Path,
    config: RunConfig,
    engine: Client,
    said: tuple[Console, Callable[[], str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, key in KEYS.items():  # which open the gateway for the environment too
        monkeypatch.setenv(name, key)
    before, files = len(engine.get("/debug/calls")["calls"]), written(folder)
    console, told = said
    dry_run(folder / "run.yaml", config, console)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in told().splitlines() if line.startswith("  ")}
    assert "env my_env.py serve" in lines["environment"]
    assert lines["reward"] in ("0", "1")
    assert lines["rewards"].endswith("of all 8 rollouts")
    assert {"asked", "answer", "tokens"} <= lines.keys()
    # The eight rollouts, and what the gateway asked to know its server.
    assert len(engine.get("/debug/calls")["calls"]) >= before + 8
    assert written(folder) == files, "a dry run leaves nothing behind"
    assert processes_of(folder) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(RUN_S)
def test_a_dry_run_of_an_environment_that_fails_says_why(
    folder: Path, config: RunConfig, said: tuple[Console, Callable[[], str]]
) -> None:
    text = (folder / "my_env.py").read_text()
    (folder / "broken_env.py").write_text(text.replace("reward = score(", "reward = 1 / 0 + score("))
    broken = config.model_copy(update={"agent": config.agent.model_copy(update={"env": "broken_env.py"})})
    with pytest.raises(HeadraceError, match=r"environment ended with code 1:\n(?s:.*)division by zero"):
        dry_run(folder / "run.yaml", broken, said[0])
    assert processes_of(folder) == []


@pytest.mark.timeout(RUN_S)
def test_evaluating_asks_the_environment_and_tells_a_table_and_json(
    folder: Path,
    config: RunConfig,
    said: tuple[Console, Callable[[], str]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    console, told = said
    found = evaluate_run(folder / "run.yaml", config, tmp_path, console=console)
    assert (found.rows, found.rollouts, found.failed) == (4, 4, 0)
    assert found.mean == found.metrics["eval/score"] == found.pass_at[1]
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["metrics"] == {"eval/score": found.mean}
    assert (line["mean"], line["pass_at"], line["model"]) == (found.mean, {"1": found.mean}, config.model)
    assert "eval/score" in told()
    assert len(json.loads((tmp_path / "evaluation.json").read_text())["played"]) == 4


# -- what an evaluation leaves -----------------------------------------------------------------------------------------


def evaluated(folder: Path, metrics: dict[str, Any], samples: list[dict[str, Any]], **options: Any) -> Any:
    Evaluation("words", "m", metrics, 2.0, samples=samples).write(folder)
    return read_evaluation(folder, "e", 3, pass_reward=1.0, **options)


def test_scores_of_samples_are_the_mean_and_make_pass_at_k(tmp_path: Path) -> None:
    samples = [{"scores": [1, 0, 0, 0], "kind": "a"}, {"scores": [1, 1, 1, 1], "kind": "b"}]
    found = evaluated(tmp_path, {"eval/best": 1.0}, samples, by=["kind"])
    assert (found.rows, found.rollouts, found.mean) == (2, 8, 0.625)
    assert found.pass_at == {1: 0.625, 2: 0.75, 4: 1.0}
    assert found.by == {"kind": {"a": 0.25, "b": 1.0}}
    assert (found.step, found.seconds, found.metrics) == (3, 2.0, {"eval/best": 1.0})
    assert untold(found, ["kind"]) == []


def test_a_sample_without_a_score_has_failed_and_is_no_zero(tmp_path: Path) -> None:
    found = evaluated(tmp_path, {}, [{"correct": True}, {"correct": None}])
    assert (found.rollouts, found.failed, found.mean, found.pass_at) == (2, 1, 1.0, {1: 1.0})


def test_a_sample_that_failed_says_why(tmp_path: Path) -> None:
    samples = [{"score": 1}, {"messages": [], "score": None, "error": "no verdict"}]
    found = evaluated(tmp_path, {"eval/score": 1.0}, samples)
    assert (found.rollouts, found.failed, found.mean) == (2, 1, 1.0)
    assert [one.failure for one in found.played] == [None, "no verdict"]


@pytest.mark.parametrize(
    ("metrics", "mean"),
    [
        ({"eval/percent_correct": 0.5, "eval/length": 9.0}, 0.5),
        ({"eval/wins": 0.25}, 0.25),
        ({"eval/wins": 0.25, "eval/length": 9.0}, None),
        ({}, None),
    ],
)
def test_without_scores_a_metric_is_the_mean_and_what_cannot_be_told_is_said(
    tmp_path: Path, metrics: dict[str, float], mean: float | None
) -> None:
    found = evaluated(tmp_path, metrics, [{"question": "?"}])
    assert (found.mean, found.pass_at, found.metrics) == (mean, {}, metrics)
    lines = untold(found, ["kind"])
    assert any(line.startswith("The mean cannot be told") for line in lines) == (mean is None)
    assert any(line.startswith("pass@k cannot be told") for line in lines)
    assert any(line.startswith("By kind nothing") for line in lines)
    assert table(found).row_count == 1 + len(metrics)


def test_an_evaluation_that_left_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=r"left no metrics.json"):
        read_evaluation(tmp_path, "e", 0, pass_reward=1.0)
