"""A line through samples says what grows, and how certainly."""

from __future__ import annotations

import os
import random

import pytest

from headrace.storm.soak import growth_of, tasks_of, usage_of


def test_what_grows_by_so_much_an_hour_is_told_with_its_error() -> None:
    chance = random.Random(5)
    samples = [(10.0 * n, 200 + 150 * (10.0 * n / 3600) + chance.gauss(0, 0.5)) for n in range(100)]
    growth = growth_of("gateway memory MB", samples)
    assert growth.per_hour == pytest.approx(150, abs=3 * growth.error)
    assert 0 < growth.error < 2
    assert growth.grows


def test_a_little_is_no_growth_however_certain() -> None:
    growth = growth_of("gateway descriptors", [(10.0 * n, 20.0 + n // 20) for n in range(100)])
    assert growth.per_hour > 4 * growth.error
    assert not growth.grows


def test_what_only_goes_up_and_down_does_not_grow() -> None:
    chance = random.Random(5)
    growth = growth_of("gateway memory MB", [(10.0 * n, 200 + chance.gauss(0, 5)) for n in range(100)])
    assert not growth.grows


def test_what_is_exactly_flat_does_not_grow() -> None:
    growth = growth_of("gateway descriptors", [(float(n), 30.0) for n in range(10)])
    assert (growth.mean, growth.per_hour, growth.error) == (30, 0, 0)
    assert not growth.grows


def test_a_journal_may_grow_until_it_is_compacted() -> None:
    assert not growth_of("journal bytes", [(float(n), 1e6 * n) for n in range(10)]).grows


def test_what_a_process_uses_is_read_and_one_that_is_gone_uses_nothing() -> None:
    assert set(usage_of(os.getpid())) == {"memory MB", "descriptors", "threads"}
    assert usage_of(2**22 + 1) == {}


def test_tasks_are_those_of_each_worker_or_of_the_one_process() -> None:
    lines = "# HELP headrace_gateway_tasks tasks\n# TYPE headrace_gateway_tasks gauge\n"
    assert tasks_of("gateway", lines + "headrace_gateway_tasks 7.0\n") == {"gateway tasks": 7}
    several = lines + "".join(f'headrace_gateway_tasks{{worker="{n}"}} {n + 5}\n' for n in range(2))
    assert tasks_of("gateway", several) == {"gateway worker 0 tasks": 5, "gateway worker 1 tasks": 6}
    assert tasks_of("api", several) == {}
