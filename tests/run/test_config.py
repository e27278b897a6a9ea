"""run.yaml: what is wrong with it is named, with what would be right, when it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.run.config import load
from headrace.run.evaluation import EvaluationConfig, task_of


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trian": {"steps": 3}}, "trian is not known; did you mean train?"),
        ({"train": {"step": 3}}, r"train\.step is not known; did you mean steps?"),
        ({"train": {"steps": 0}}, r"train\.steps: .*greater than or equal to 1, not 0"),
        ({"train": {"algorithm": {"advantage": "gpro"}}}, r"train\.algorithm\.advantage: .* did you mean grpo"),
        (
            {"agent": {"run": "agent.py:solve", "command": "x"}},
            "exactly one of run, .*given: run and command",
        ),
        ({"agent": None}, r"agent: Field required"),
        ({"data": None}, r"data is missing: .*data: \{train: train.jsonl\}"),
        ({"agent": {"env": "my_env.py"}}, "data is given and agent.env too: .*leave data out"),
        ({"agent": {"env": "e.py"}, "data": None}, "reward is given and agent.env too: .*leave reward out"),
        (
            {"agent": {"env": "e.py"}, "data": None, "reward": None, "evaluate": {"sampling": {"temperature": 0.0}}},
            "evaluate.sampling is given and agent.env too",
        ),
        ({"servers": {"start": "sglang serve"}}, r"'sglang serve' should be headrace engine .*\{model\} and \{port\}"),
        ({"servers": {"start": "headrace engine", "addresses": ["http://a:1"]}}, "give one of them"),
        ({"servers": {"addresses": ["localhost:8001"]}}, "it looks like http://127.0.0.1:8001"),
        ({"reward": {"rules": [{"use": "math_verfy"}]}}, "math_ver"),
        ({"reward": {}}, "nothing that gives a reward"),
        ({"where": "cloud"}, "where"),
        ({"model": "/no/such/folder"}, "model: there is no folder /no/such/folder"),
    ],
)
def test_what_is_wrong_is_named(changed: Callable[..., Any], sections: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        changed(**sections)


def test_paths_are_below_the_files_folder(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(written / "run.yaml")
    assert config.model == str(written / "model")
    assert config.data is not None
    assert config.data.train == written / "train.jsonl"
    own = load(written / "run.yaml", ["train.algorithm.loss=mine.py:loss"])
    assert own.train.algorithm.loss == f"{written}/mine.py:loss"


def test_a_tilde_is_the_home_folder(written: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(written / "run.yaml", ["data.train=~/mine.jsonl", "data.val=~/held_out.jsonl"])
    assert config.data is not None
    assert (config.data.train, config.data.val) == (tmp_path / "mine.jsonl", tmp_path / "held_out.jsonl")
    config = load(written / "run.yaml", ["agent={env: ~/my_env.py}", "data=null", "reward=null"])
    assert config.agent.env == str(tmp_path / "my_env.py")


def test_values_are_set_on_the_command_line(written: Path) -> None:
    config = load(written / "run.yaml", ["train.steps=3", "train.optimizer.lr=0.5", "evaluate.by=[data_source]"])
    assert (config.train.steps, config.train.optimizer.lr, config.evaluate.by) == (3, 0.5, ["data_source"])
    assert config.train.optimizer.epochs == 2  # the file's


def test_an_evaluation_may_be_sampled_otherwise(written: Path) -> None:
    assert load(written / "run.yaml").evaluate.sampling.model_dump(exclude_none=True) == {}
    chosen = load(written / "run.yaml", ["evaluate.sampling={temperature: 0, max_tokens: 5}"]).evaluate.sampling
    config = EvaluationConfig.model_validate(
        {
            **dict.fromkeys(("base", "gateway", "pool", "model", "name", "into"), "x"),
            "data": {"train": "x"},
            "agent": {"run": "x.py:play"},
            "sampling": chosen.model_dump(exclude_none=True),
        }
    )
    assert task_of(config, {"question": "q"}, 3, 1).sampling == {"temperature": 0, "max_tokens": 5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("evaluate.sampling.top_p=2", "evaluate.sampling.top_p"),
        ("evaluate.sampling.temprature=0", "did you mean temperature"),
        ("train.steps", "should be key=value"),
        ("train.steps=2026-13-45", "is no value of YAML: month"),
        ("model.size=3", "model is 'model', which has no fields"),
        ("train.steps=[", "no value of YAML"),
        ("data.val=~no-such-user/val.jsonl", "data.val: .*~no-such-user/.* names a home folder that is not known here"),
    ],
)
def test_a_wrong_change_is_named(written: Path, change: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load(written / "run.yaml", [change])
