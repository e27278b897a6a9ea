"""Probes: what a reward pays for, without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.envs import probe_env

from headrace.cli import main
from headrace.envs.probe.model import ModelCall, PolicyAnswer, Script
from headrace.envs.probe.policies import POLICIES, PolicyPrompt, answer_of, final_answer, in_format
from headrace.envs.probe.report import PolicyScores, ProbeReport

FILE = Path(probe_env.__file__)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["headrace"])
    monkeypatch.setattr("sys.path", list(__import__("sys").path))


def probed(name: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a probe."""
    with pytest.raises(SystemExit) as ended:
        main(["env", str(FILE), "--class", name, "probe", "--items", "3", "--json", "found.json"])
    return int(ended.value.code or 0), json.loads(Path("found.json").read_text())


@pytest.mark.parametrize("name", ["Fair", "Choosy"])
def test_a_fair_reward_has_nothing_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = probed(name)
    assert code == 0
    assert (found["floor"], found["ceiling"], found["hackable"], found["deterministic"]) == (0, 1, 0, 1)
    assert {one["policy"]: one["mean"] for one in found["policies"]} == {
        **dict.fromkeys(("empty", "echo", "format", "padding", "judge", "gold"), 0.0),
        "gold in format": 1.0,
    }
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("Formal", "hackable: 'format' earns 1 without an answer"),
        ("Long", "hackable: 'padding' earns"),
        ("Judged", "hackable: 'judge' earns 10 without an answer"),
        ("Flat", "flat: everything earns 0.5"),
        ("Restless", "not deterministic: the same answer earned something else"),
        ("Fragile", "raises: 'empty' ends a rollout with list index out of range"),
    ],
)
def test_what_is_wrong_with_a_reward_is_found(name: str, finding: str) -> None:
    code, found = probed(name)
    assert code == 3
    assert any(one.startswith(finding) for one in found["findings"]), found["findings"]
    assert found["judged"] == (name == "Judged")


@pytest.mark.parametrize("example", ["env_sums.py", "env_number.py"])
def test_the_examples_say_what_the_right_answer_is(example: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["env", str(EXAMPLES / example), "probe", "--items", "3", "--json", "found.json"])
    found = json.loads(Path("found.json").read_text())
    assert not ended.value.code
    assert (found["ceiling_is_gold"], found["ceiling"], found["hackable"]) == (True, 1, 0)


def test_where_no_answer_is_known_the_report_says_how_to_tell_one() -> None:
    report = ProbeReport("Sums", 1, [PolicyScores("empty", knows=False, scores=[0.0])], [0.1], judged=False)
    assert "gold_answer(item)" in str(report)


@pytest.mark.parametrize(
    ("item", "answer"),
    [
        ({"question": "?", "answer": 4}, "4"),
        ({"data": {"solution": "x"}}, "x"),
        (("question", "gold"), "gold"),
        (((("role", "user"), ("content", "?")), "gold"), None),
        (({"role": "user", "content": "?"},), None),
        ((3, 4), None),
        ("question", None),
        (({"prompt": "?", "target": ["a", "b"]}, 0), "a"),
    ],
)
def test_an_items_answer_is_found_where_it_carries_one(item: Any, answer: str | None) -> None:
    assert answer_of(item) == answer


def test_an_answer_stands_in_the_form_that_is_asked_for() -> None:
    assert final_answer("so it is\n#### 42") == "42"
    asked = PolicyPrompt("", "Think in <think> </think>, then write \\boxed{}.", "42")
    said = in_format(asked, "42")
    assert said.startswith("<think>")
    assert said.endswith("</think>\n\\boxed{42}")
    assert "<answer>42</answer>" in in_format(PolicyPrompt("", "no form", None), "42")


def said(script: Script, asked: str, **more: Any) -> str:
    """The name of the policy that answers a call."""
    call = ModelCall(asked, asked, "\nassistant: ", **more)
    policy, text = script.answer(call)
    assert policy is not None
    script.said.append(PolicyAnswer(policy, call, text))
    return policy.name


def test_policies_take_turns_and_each_goes_on_with_its_own_conversation() -> None:
    script = Script()
    script.begin(POLICIES, None)
    assert [said(script, "user: ?") for _ in range(5)] == ["empty", "echo", "format", "padding", "judge"]
    for one in list(script.said):
        assert said(script, f"{one.whole}\nuser: and then?") == one.policy.name
    assert said(script, f"{script.said[3].whole}\nuser: and then?", several=True) == "empty"


def test_rollouts_side_by_side_keep_their_policies_when_they_forget_what_was_said() -> None:
    script = Script()
    script.begin(POLICIES, "42")
    assert [said(script, f"user: {turn}", task=task) for turn in range(2) for task in (1, 2)] == [
        *("empty", "echo"),
        *("empty", "echo"),
    ]
