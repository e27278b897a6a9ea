"""What a look at this machine tells before anything is started: each problem is named with its fix, all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.net.server import listener
from headrace.run.checks import check, problems


def test_a_new_project_has_no_problems(changed: Callable[..., Any]) -> None:
    assert problems(*changed()) == []


BROKEN = "import no_such_library\ndef score(sample): return 0\n"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"train": "nothing.jsonl"}}, "there is no file .*nothing.jsonl"),
        (
            {"data": {"train": "train.jsonl", "prompt": "promt"}},
            "line 1: has no column 'promt'; did you mean prompt?",
        ),
        ({"data": {"val": "val.jsonl"}}, "data.train is missing"),
        ({"agent": {"run": "agent.py:solv"}}, "agent.run: .*'solv'; did you mean solve?"),
        ({"agent": {"run": "agnt.py:solve"}}, "agent.run: there is no file .*agnt.py"),
        ({"agent": {"run": "broken.py:score"}}, "agent.run: .*broken.py cannot be imported: .*no_such_library"),
        ({"agent": {"flow": "singel_turn"}}, "agent.flow: .*singel_turn"),
        ({"agent": {"command": ["no-such-program"]}}, "agent.command: .*no-such-program"),
        ({"agent": {"env": "no_env.py"}, "data": None, "reward": None}, "agent.env: there is no file .*no_env.py"),
        ({"agent": {"env": "broken.py"}, "data": None}, "agent.env: broken.py needs the module 'no_such_library'"),
        ({"agent": {"env": "empty.py"}, "data": None}, "agent.env: .*empty.py has no environment"),
        ({"reward": {"functions": ["reward.py:scor"]}}, "reward: .*'scor'.*score"),
        ({"reward": {"functions": ["broken.py:score"]}}, "reward: .*no_such_library"),
        ({"reward": {"rules": ["exact_match"], "ground_truth": "truth"}}, "data.train: .*line 1: has no 'truth'"),
        ({"evaluate": {"by": ["source"]}}, "evaluate.by: data.train has no column 'source'; it has prompt"),
        (
            {"servers": {"start": "no-such {model} {port}"}},
            "servers.start: there is no program 'no-such'",
        ),
        ({"servers": {"addresses": ["http://127.0.0.1:9"]}}, "servers.addresses: .*start it"),
        ({"where": {"ray": "127.0.0.1:9"}}, "where.ray: no cluster at 127.0.0.1:9: .*ray start --head"),
        ({"model": "runs"}, "model: .*runs has no config.json"),
        ({"train": {"algorithm": {"loss": "broken.py:loss"}}}, "train: .*broken.py cannot be imported"),
        ({"train": {"algorithm": {"loss": "empty.py:loss"}}}, "train: .*empty.py has no 'loss'"),
    ],
)
def test_a_problem_is_named_with_its_fix(changed: Callable[..., Any], sections: dict[str, Any], said: str) -> None:
    _, base = changed()
    (base / "broken.py").write_text(BROKEN)
    (base / "empty.py").write_text("")
    (base / "runs").mkdir()
    with pytest.raises(InvalidInput, match=said):
        check(*changed(**{"reward": None, **sections}))


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux'")
def test_a_machine_that_cannot_confine_an_answers_program_is_named(
    changed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.sandbox.MUST_HOLD", ("a moat",))
    with pytest.raises(InvalidInput, match=r"reward: unit_tests: .*a moat cannot be held"):
        check(*changed(reward={"rules": ["unit_tests"]}))


def test_a_port_in_use_is_named(changed: Callable[..., Any]) -> None:
    with listener("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"gateway.port {port}"):
            check(*changed(reward=None, gateway={"port": port}))


def test_all_problems_are_told_at_once(changed: Callable[..., Any], tmp_path: Path) -> None:
    found = problems(*changed(reward=None, data={"train": "nothing.jsonl"}, agent={"run": "agnt.py:solve"}))
    assert len(found) == 2
