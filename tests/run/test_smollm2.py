"""examples/smollm2: its data, its reward, its tool, its chat format, and its agent on a real gateway."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.gateway.rollout import Rollout, in_front, scripted, uid_of
from tests.tokens import models as tokenizers

from headrace import DataPool
from headrace.rewards import Sample
from headrace.rewards.recorded import SampleReader
from headrace.run.config import load
from headrace.tokens import load_renderer

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    return module("agent")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's folder, with the example's template as model.py writes it."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    shutil.copytree(tokenizers.folder("smollm2"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(EXAMPLE / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Rollout]:
    with scripted(model) as found:
        yield found


def test_the_file_of_the_run_is_short_and_fits(model: Path) -> None:
    for name in ("run.yaml", "agent.py", "reward.py"):
        shutil.copy(EXAMPLE / name, model.parent)
    assert len((EXAMPLE / "run.yaml").read_text().splitlines()) < 30
    config = load(model.parent / "run.yaml")
    assert (config.model, config.n_rollouts) == (str(model), 16)
    assert config.reward is not None
    config.reward.below(model.parent)


def test_no_problem_is_both_learned_from_and_held_out() -> None:
    data = module("data")
    train, val = data.rows()
    assert (len(train), len(val)) == (data.TRAIN, data.VAL)
    assert not {row["question"] for row in train} & {row["question"] for row in val}
    assert {row["kind"] for row in val} == set(data.WORDS)
    assert data.rows() == (train, val)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("926 + 410", "1336"),
        ("(926 + 410) * 58", "77488"),
        ("-3 - 4", "-7"),
        ("9 / 2", "error: not an expression of whole numbers with + - *"),
        ("True + 1", "error: not an expression of whole numbers with + - *"),
        ("each x 58", "error: not an expression of whole numbers with + - *"),
        ("9 ** 9 ** 9", "error: not an expression of whole numbers with + - *"),
        ("999999999999 * 999999999999", "error: too large"),
    ],
)
def test_the_calculator_works_out_whole_numbers_and_says_what_it_cannot(
    agent: ModuleType, expression: str, result: str
) -> None:
    assert agent.calculated(expression) == result


def played(*turns: dict[str, Any]) -> Sample:
    """A conversation after an example that was right; the answer should be 12."""
    called = {"role": "assistant", "content": CALL % "5 + 5"}
    example = [{"role": "user", "content": "5 + 5?"}, called, {"role": "tool", "content": "10"}]
    asked = {"role": "user", "content": "7 + 5?"}
    return Sample(messages=[*example, asked, *turns], text=str(turns[-1]["content"]), ground_truth="12")


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("turns", "worth"),
    [
        ([said("It is 13.")], 0.0),
        ([said("It is 12.")], 0.7),
        ([said('<tool_call>{"name": 12</tool_call>')], 0.05),
        ([said("", tool_calls=[{}]), {"role": "tool", "content": "error: too large"}, said("sorry")], 0.15),
        ([said("", tool_calls=[{}]), {"role": "tool", "content": "35"}, said("35")], 0.3),
        ([said("", tool_calls=[{}]), {"role": "tool", "content": "12"}, said("12")], 1.0),
        ([said("", tool_calls=[{}]), {"role": "tool", "content": "1012"}, said("1,012, or 12")], 1.0),
    ],
)
def test_each_thing_on_the_way_is_paid(turns: list[dict[str, Any]], worth: float) -> None:
    assert module("reward").score(played(*turns)).value == pytest.approx(worth)


def test_the_template_appends_every_kind_of_turn_and_its_calls_are_read(model: Path) -> None:
    renderer = load_renderer(model)
    assert renderer.grammar.calls is not None
    assert renderer.grammar.calls.open.strip() == "<tool_call>"
    assert not renderer.traits.refused  # type: ignore[attr-defined]
    assert not renderer.overrides


@pytest.mark.parametrize(
    ("script", "calls", "worth"),
    [
        ([CALL % "926 + 410", "1336"], 2, 1.0),
        ([CALL % "926 - 410", "516"], 2, 0.3),
        ([(CALL % "926 + 410").replace("calculate", "add")], 1, 0.15),
        ([CALL % "926 +", CALL % "926", CALL % "410", "not asked for"], 3, 0.3),
    ],
    ids=["right", "wrong", "a tool that is not there", "more turns than it has"],
)
async def test_the_agent_plays_a_rollout_that_is_one_sequence(
    agent: ModuleType, server: Rollout, model: Path, script: list[str], calls: int, worth: float
) -> None:
    server.forget()
    server.script.extend(script)
    with DataPool() as pool, in_front(server, model, pool) as gateway:
        base = gateway.post("/init_trajectory", {"metadata": {"ground_truth": "1336"}}).json()["base_url"]
        await agent.solve({"question": "What is 926 + 410?"}, base, "not-needed")
        trajectory = pool.trajectory(uid_of(base))
    assert len(trajectory.steps) == calls
    assert len(trajectory.sequences()) == 1
    sample = SampleReader(load_renderer(model)).outcome(trajectory)
    assert sample is not None
    assert module("reward").score(sample).value == pytest.approx(worth)
