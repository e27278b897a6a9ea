"""What the contract says of the original, said by the original."""

from __future__ import annotations

import socket

import httpx
import pytest
from tests.atropos.calls import Call, Scenario
from tests.atropos.groups import group
from tests.atropos.player import differ, play
from tests.atropos.record import answers_of
from tests.atropos.scenarios import SCENARIOS
from tests.atropos.words import NOT_READY, environment, opening, send, status


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_the_original_answers_as_the_contract_says_and_as_recorded(scenario: Scenario, original: str) -> None:
    answers = play(original, scenario)
    said = [
        f"[{n}] {call.method} {call.path}: {what}"
        for n, (call, answer) in enumerate(zip(scenario.calls, answers, strict=True))
        for what in differ(call, answer)
    ]
    assert said == []
    assert answers == answers_of(scenario.name)


def test_a_batch_whose_trainer_has_gone_is_lost(original: str) -> None:
    play(original, Scenario("", (*opening(8, environment(4)), *send(group(1, 4, 0), group(2, 4, 0)))))
    with socket.create_connection(("127.0.0.1", httpx.URL(original).port or 0)) as connection:
        connection.sendall(b"GET /batch HTTP/1.1\r\nhost: x\r\n\r\n")
    gone, again = play(original, Scenario("", (status(1, 0), Call("GET", "/batch"))))
    assert (gone.body, again.body) == ({"current_step": 1, "queue_size": 0}, NOT_READY)
