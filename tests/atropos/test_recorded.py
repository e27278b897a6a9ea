"""The record of the original is of today's scenarios, and is what the contract says."""

from __future__ import annotations

import pytest
from tests.atropos.calls import Scenario
from tests.atropos.player import differ
from tests.atropos.record import answers_of, recorded
from tests.atropos.scenarios import SCENARIOS


def test_it_holds_every_call_of_every_scenario() -> None:
    """Where it does not: python -m tests.atropos.record."""
    calls = {one.name: [f"{n} {call.key}" for n, call in enumerate(one.calls)] for one in SCENARIOS}
    assert {name: list(answers) for name, answers in recorded().items()} == calls


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_it_says_what_the_contract_says(scenario: Scenario) -> None:
    pairs = zip(scenario.calls, answers_of(scenario.name), strict=True)
    assert [(n, what) for n, (call, answer) in enumerate(pairs) for what in differ(call, answer)] == []
