"""A run on simulated time: what it does follows from what it is told, and the pool decides what is trained on."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.files import checked
from headrace.simulate import Outcome, Scenario, Survivors, simulate

#: Rollouts of one turn that take one second each, and a trainer that takes one second a step.
PLAIN: dict[str, Any] = {
    "agents": 32,
    "hours": 0.03,
    "rollouts": {
        "turns": 1,
        "prompt_tokens": 0,
        "response_tokens": 100,
        "observation_tokens": 0,
        "environment_s": 0,
    },
    "servers": {"count": 1, "token_ms": 10, "call_ms": 0, "max_calls": 1000},
    "gateway": {"call_ms": 0},
    "pool": {"step_us": 0},
    "trainer": {
        "batch_size": 4,
        "n_rollouts": 8,
        "max_staleness": 1,
        "step_s": 1,
        "tokens_s": None,
        "sync_s": 0,
        "hold_s": 0,
    },
}


def played(**changes: Any) -> Outcome:
    scenario = checked(Scenario, PLAIN, "the test's scenario")
    for name, value in changes.items():
        scenario = scenario.changed(name.replace("__", "."), value)
    return simulate(scenario)


def test_a_balanced_run_neither_waits_nor_drops() -> None:
    found = played()
    assert found.rollouts_s == pytest.approx(32, rel=0.05)
    assert found.steps_h == pytest.approx(3600, rel=0.05)
    assert found.sampled_tokens_s == pytest.approx(3200, rel=0.05)
    assert found.trainer_waiting < 0.05
    assert found.dropped == {}
    assert found.staleness_max <= 1


def test_half_the_agents_have_the_trainer_wait_half_the_time() -> None:
    found = played(agents=16)
    assert found.trainer_waiting == pytest.approx(0.5, abs=0.05)
    assert found.rollouts_s == pytest.approx(16, rel=0.05)


def test_a_rollouter_never_plays_what_would_grow_too_stale() -> None:
    found = played(agents=512, trainer__step_s=3)
    assert found.dropped == {}
    assert found.staleness_max <= 1
    assert found.rollouts_s == pytest.approx(32 / 3, rel=0.1)


def test_live_agents_beyond_what_the_trainer_takes_are_dropped_for_their_age() -> None:
    found = played(source="live", agents=128)
    assert found.rollouts_s == pytest.approx(128, rel=0.05)
    assert sum(found.dropped.values()) == pytest.approx(0.75, abs=0.05)
    assert found.staleness_max <= 1
    ahead = played(source="live", agents=128, ahead=4)
    assert ahead.dropped == {}


def test_long_rollouts_are_dropped_first_where_staleness_is_bounded() -> None:
    spread = {"median": 100, "p99": 3000}
    found = played(source="live", ahead=12, agents=128, rollouts__response_tokens=spread, trainer__n_rollouts=1)
    assert sum(found.dropped.values()) > 0.02
    assert found.survivors.longest < 0.5 < found.survivors.shares[0]
    assert found.survivors.length_ratio < 0.9


def test_servers_that_are_full_are_named_as_the_limit() -> None:
    found = played(servers__call_ms=5, trainer__step_s=0.1)
    assert found.busy["servers"] > 0.8
    assert found.limit == "servers"
    assert played(agents=4).limit == "agents"


def test_a_gateway_s_cpu_bounds_the_calls() -> None:
    found = played(source="live", gateway__call_ms=100)
    assert found.calls_s == pytest.approx(10, rel=0.05)
    assert found.limit == "gateways"
    assert played(source="live", gateway__call_ms=100, gateway__workers=2).calls_s == pytest.approx(20, rel=0.05)


def test_an_exchange_of_weights_holds_servers_and_trainer() -> None:
    found = played(trainer__sync_s=1, trainer__hold_s=1)
    assert found.steps_h == pytest.approx(1800, rel=0.05)


def test_the_same_scenario_has_the_same_outcome_and_another_seed_another() -> None:
    spread = {"median": 100, "p99": 1000}
    assert played(rollouts__response_tokens=spread) == played(rollouts__response_tokens=spread)
    assert played(rollouts__response_tokens=spread) != played(rollouts__response_tokens=spread, seed=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ahead": 40}, "ahead is of live agents"),
        ({"source": "live", "ahead": 2}, "a batch of 4 groups would never be there"),
        ({"trainer__max_staleness": None}, "needs trainer.max_staleness"),
        ({"pool__max_queue_size": 3}, "never holds a batch of 4 groups"),
        ({"servers__token_ms": 0}, "a token must take some time"),
        ({"rollouts__turns": {"median": 5, "p99": 2}}, "p99 is 2, below the median of 5"),
        ({"servers__cuont": 3}, "count"),
    ],
)
def test_a_scenario_that_cannot_work_is_refused_by_its_field(changes: dict[str, Any], words: str) -> None:
    values = checked(Scenario, PLAIN, "the test's scenario").model_dump()
    for name, value in changes.items():
        *path, last = name.split("__")
        at = values
        for part in path:
            at = at[part]
        at[last] = value
    with pytest.raises(InvalidInput, match=words):
        checked(Scenario, values, "changed")


def test_survivors_are_told_by_length() -> None:
    ended = [(length, length <= 50) for length in range(1, 101)]
    assert Survivors.of(ended) == Survivors((1.0, 1.0, 0.0, 0.0), 0.0, pytest.approx(25.5 / 50.5))
