"""How many calls a server may have in flight: the rule, over any history of calls."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.errors import InvalidInput
from headrace.envs.server.concurrency import CallOutcome, Concurrency

OUTCOMES: list[CallOutcome] = ["ok", "overloaded", "other"]
Event = Literal["begin"] | tuple[int, CallOutcome] | float
events = st.lists(
    st.one_of(
        st.just("begin"),
        st.tuples(st.integers(0, 100), st.sampled_from(OUTCOMES)),
        st.floats(0, 1),
    ),
    max_size=200,
)


@given(st.integers(1, 600), events)
def test_the_limit_stays_within_its_bounds_whatever_happens(most: int, happened: list[Event]) -> None:
    control, open_calls = Concurrency(most), list[int]()
    for event in happened:
        before = control.allowed
        if event == "begin":
            if control.free:
                open_calls.append(control.begin())
                assert control.in_flight <= before
        elif isinstance(event, float):
            control.weigh(event)
        elif isinstance(event, tuple) and open_calls:
            control.end(open_calls.pop(event[0] % len(open_calls)), event[1])
            if event[1] == "ok":
                assert before <= control.allowed <= before + 1
            elif event[1] == "overloaded":
                assert control.allowed <= before
            else:
                assert control.allowed == before
        assert control.in_flight == len(open_calls)
        assert 1 <= control.allowed <= most
        assert control.free == max(0, control.allowed - control.in_flight)


@given(st.integers(2, 600), st.data())
def test_a_burst_of_refusals_cuts_once(most: int, data: st.DataObject) -> None:
    control = Concurrency(most)
    began = [control.begin() for _ in range(data.draw(st.integers(1, most)))]
    for call in began:
        control.end(call, "overloaded")
    assert control.allowed == max(1, most // 2)
    control.end(control.begin(), "overloaded")
    assert control.allowed == max(1, most // 4)


@given(st.integers(1, 40))
def test_calls_that_go_well_win_back_what_was_lost(most: int) -> None:
    control = Concurrency(most)
    for _ in range(10):
        control.end(control.begin(), "overloaded")
    assert control.allowed == 1
    rounds = 0
    while control.allowed < most:
        for call in [control.begin() for _ in range(control.free)]:
            control.end(call, "ok")
        rounds += 1
        assert rounds <= 3 * most + 3, "it does not come back"


def test_a_limit_that_nobody_comes_near_is_not_raised() -> None:
    control = Concurrency(64)
    control.end(control.begin(), "overloaded")
    for _ in range(1000):
        control.end(control.begin(), "ok")
    assert control.allowed == 32


@given(st.integers(1, 600), st.floats(0, 1))
def test_the_weight_scales_what_is_allowed_and_one_call_always_is(most: int, weight: float) -> None:
    control = Concurrency(most)
    control.weigh(weight)
    assert control.allowed == max(1, int(most * weight))


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_a_weight_outside_of_its_range_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidInput, match="weight"):
        Concurrency(1).weigh(wrong)


def test_no_place_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        Concurrency(0)
