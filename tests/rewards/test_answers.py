"""Checks of answers are bounded by what they compute, and never by the clock."""

from __future__ import annotations

import threading

import pytest

from headrace.rewards.answers import bounded, is_right


def compute_for_ever() -> None:
    while True:
        pass


def test_what_computes_for_too_long_is_broken_off() -> None:
    with pytest.raises(TimeoutError, match="processor time"), bounded(0.05):
        compute_for_ever()


def test_a_thread_may_check_too() -> None:
    found: list[bool] = []
    checking = threading.Thread(target=lambda: found.append(is_right("\\boxed{1/2}", "0.5")))
    checking.start()
    checking.join()
    assert found == [True]
