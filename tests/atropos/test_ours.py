"""Ours answers every call as the original did when it was recorded, but for what the contract lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.atropos.calls import Scenario
from tests.atropos.differential import differences
from tests.atropos.ours import ours
from tests.atropos.player import play
from tests.atropos.record import answers_of
from tests.atropos.scenarios import SCENARIOS

from headrace import DataPool


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[DataPool, str]]:
    with ours() as found:
        yield found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_ours_answers_as_the_original_did(scenario: Scenario, server: tuple[DataPool, str]) -> None:
    pool, address = server
    pool.desk_reset()
    assert list(differences(scenario, answers_of(scenario.name), play(address, scenario))) == []
