"""Work does not grow with the queue: lines executed, every step along a lane counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from sortedcontainers import SortedList

from headrace.pool.scored import queue
from headrace.pool.scored.batching import Batching

SHORT, LONG = 1_000, 100_000
ENVS = 4


class Stepwise(SortedList):  # type: ignore[misc]
    """A lane along which no step is hidden in C."""

    def __iter__(self) -> Iterator[Any]:
        for group in super().__iter__():  # noqa: UP028
            yield group


def lines_run(call: Callable[[], object]) -> int:
    count = 0

    def tracer(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def filled(groups: int, sizes: list[int], share: float | None = None) -> Batching:
    batching = Batching()
    for env in range(ENVS):
        batching.connect(env, group_size=sizes[env % len(sizes)], max_token_length=1, min_allocation=share)
    for number in range(groups):
        env = number % ENVS
        batching.add(number, env, sizes[env % len(sizes)])
    return batching


QUEUES: dict[str, dict[str, Any]] = {
    "packs of one size": {"sizes": [8]},
    "packs of several sizes": {"sizes": [1, 2, 4, 8]},
    "sizes that do not pack": {"sizes": [6, 7, 9]},
    "a minimum for everyone": {"sizes": [8], "share": 0.2},
    "minimums and several sizes": {"sizes": [4, 8, 6], "share": 0.2},
}


@pytest.mark.parametrize("kind", QUEUES)
def test_a_batch_costs_the_same_at_any_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SortedList", Stepwise)
    short, long = (filled(groups, **QUEUES[kind]) for groups in (SHORT, LONG))
    costs = [sum(lines_run(lambda b=b: b.take(128)) for _ in range(3)) for b in (short, long)]  # type: ignore[misc]
    assert costs[0] > 100
    assert costs[1] <= 1.1 * costs[0]


@pytest.mark.parametrize("kind", ["packs of several sizes", "minimums and several sizes"])
def test_everything_else_costs_the_same_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SortedList", Stepwise)
    short, long = (filled(groups, **QUEUES[kind]) for groups in (SHORT, LONG))

    def costs(batching: Batching) -> list[int]:
        batch = batching.take(128) or []
        return [
            lines_run(lambda: batching.status(0, 128)),
            lines_run(lambda: batching.give_back(batch)),
            lines_run(lambda: batching.forget(batch)),
            lines_run(lambda: batching.add(LONG, 0, 3)),
            lines_run(lambda: batching.dead_letters(128)),
        ]

    for at_short, at_long in zip(costs(short), costs(long), strict=True):
        assert at_long <= 1.2 * at_short + 10


def test_a_queue_that_gives_no_batch_is_as_cheap_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SortedList", Stepwise)
    short, long = (filled(groups, sizes=[6]) for groups in (SHORT, LONG))  # sixes never make 128
    assert short.take(128) is None
    assert lines_run(lambda: long.take(128)) <= 1.1 * lines_run(lambda: short.take(128))
