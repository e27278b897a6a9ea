"""The bucket: no more than what was saved up and what came in, and whoever waits as told is let in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.tenants import TokenBucket

RATES = st.floats(0.01, 1e4)
MOST = st.floats(1, 1e5)
GAPS = st.lists(st.floats(0, 100), max_size=50)


@given(RATES, MOST, GAPS)
def test_whatever_the_times_no_more_is_taken_than_was_there(rate: float, most: float, gaps: list[float]) -> None:
    bucket, now, taken = TokenBucket.full(rate, most, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        while taken < 500 and bucket.wait(now, 1) == 0:
            bucket = bucket.less(now, 1)
            taken += 1
        assert taken <= most + rate * now + 1e-6 * (1 + taken)


@given(RATES, MOST, GAPS, st.floats(0, 1e6))
def test_who_waits_as_long_as_told_is_let_in_and_not_before(
    rate: float, most: float, gaps: list[float], spent: float
) -> None:
    bucket, now = TokenBucket.full(rate, most, 0.0), 0.0
    for gap in gaps:
        now += gap
        bucket = bucket.less(now, spent / (1 + len(gaps)))
    wait = bucket.wait(now, 1)
    assert bucket.at(now + wait).level >= 1 - 1e-6 * (1 + abs(bucket.level))
    if wait > 1e-3:
        assert bucket.wait(now + wait / 2, 1) > 0


@given(RATES, MOST, st.floats(0, 1e5), st.floats(0, 1e5))
def test_time_in_two_pieces_is_time_in_one(rate: float, most: float, first: float, second: float) -> None:
    empty = TokenBucket.full(rate, most, 0.0).less(0.0, most)
    at_once, in_two = empty.at(first + second).level, empty.at(first).at(first + second).level
    assert abs(at_once - in_two) <= 1e-6 * (1 + at_once)


def test_a_clock_that_goes_back_brings_nothing_and_no_bucket_overflows() -> None:
    bucket = TokenBucket.full(2, 10, 100.0).less(100.0, 10)
    assert bucket.at(50.0).level == 0
    assert bucket.at(50.0).at(101.0).level == 2
    assert bucket.at(1e9).level == 10


def test_more_than_it_holds_is_let_in_once_it_is_full() -> None:
    assert TokenBucket.full(1, 5, 0.0).wait(0.0, 50) == 0
