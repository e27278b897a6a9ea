"""The comparison with the original lets nothing pass but what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.atropos.differential import ALLOWED, differences
from tests.atropos.player import Answer
from tests.atropos.record import answers_of
from tests.atropos.scenarios import SCENARIOS

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NAME = "a_batch_when_there_is_one"


def compare(number: int, **changed: Any) -> list[str]:
    """What is said of a server that differs from the original in one answer."""
    theirs = answers_of(NAME)
    ours = list(theirs)
    ours[number] = replace(ours[number], **changed)
    return list(differences(BY_NAME[NAME], theirs, ours))


def test_every_allowance_is_for_a_call_of_a_scenario() -> None:
    calls = {(one.name, n, f"{call.method} {call.path}") for one in SCENARIOS for n, call in enumerate(one.calls)}
    assert set(ALLOWED) - calls == set()


def test_the_original_differs_from_itself_only_where_ours_must_be_better() -> None:
    answers = {name: answers_of(name) for name in BY_NAME}
    found = [what for one in SCENARIOS for what in differences(one, answers[one.name], answers[one.name])]
    must = [key for key, allowed in ALLOWED.items() if not allowed.holds(answers[key[0]][key[1]])]
    assert sorted(what.partition(":")[0] for what in found) == sorted(f"{name}[{n}] {call}" for name, n, call in must)


def test_equal_answers_do_not_differ() -> None:
    assert list(differences(BY_NAME[NAME], answers_of(NAME), answers_of(NAME))) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"status": 429}, "status 429, not the original's 200"),
        (
            {"body": {"current_step": 0.0, "queue_size": 1}},
            "{'current_step': 0.0, 'queue_size': 1}, not the original's",
        ),
        ({"body": {"current_step": 0, "queue_size": True}}, "'queue_size': True}, not the original's"),
        ({"body": {"current_step": 0, "queue_size": 1, "more": 1}}, "'more': 1}, not the original's"),
        ({"headers": {"content-type": "text/html"}}, "{'content-type': 'text/html'}, not the original's"),
    ],
)
def test_a_difference_is_said_with_its_call(changed: dict[str, Any], words: str) -> None:
    (said,) = compare(5, **changed)
    assert said.startswith(f"{NAME}[5] GET /status: ")
    assert words in said


def test_an_allowance_lets_its_own_answers_pass_alone() -> None:
    scenario = BY_NAME["a_batch_after_a_reset"]
    theirs = answers_of(scenario.name)
    good = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}
    for body, count in ((good, 0), ({"batch": None}, 1)):
        ours = [*theirs[:3], Answer(200, {"content-type": "application/json"}, body)]
        assert len(list(differences(scenario, theirs, ours))) == count
