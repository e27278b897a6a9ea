"""Checks of answers are bounded by what they compute, and never by the clock."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from headrace.rewards.answers import bounded, is_right


def compute_for_ever() -> None:
    while True:
        pass


def compute_on_whatever_is_raised() -> None:
    with suppress(BaseException):
        compute_for_ever()
    compute_for_ever()


def test_what_computes_for_too_long_is_broken_off() -> None:
    with pytest.raises(TimeoutError, match="processor time"), bounded(0.05):
        compute_for_ever()


def test_what_goes_on_after_every_exception_is_broken_off_too() -> None:
    with pytest.raises(TimeoutError, match="processor time"), bounded(0.05), suppress(Exception):  # as sympy does
        compute_for_ever()


def test_what_goes_on_whatever_is_raised_is_broken_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.rewards.answers.AGAIN_S", 0.05)
    with pytest.raises(TimeoutError, match="processor time"), bounded(0.05):
        compute_on_whatever_is_raised()


def test_a_thread_may_check_too() -> None:
    found: list[bool] = []
    checking = threading.Thread(target=lambda: found.append(is_right("\\boxed{1/2}", "0.5")))
    checking.start()
    checking.join()
    assert found == [True]
