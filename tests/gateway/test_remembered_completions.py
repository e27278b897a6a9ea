"""A client that did not hear how it ended a trajectory is told again, for a while."""

from __future__ import annotations

from headrace.gateway.routes.trajectories import COMPLETION_S, RememberedCompletions
from headrace.pool.operation import Completion

DONE, LATE = Completion("ok", 3), Completion("late", 3)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_same_end_is_answered_as_it_was_and_another_is_late() -> None:
    known = RememberedCompletions()
    assert known.answer("a", 1.0, DONE) is DONE
    assert known.answer("a", 1.0, LATE) is DONE
    assert known.answer("a", 0.0, LATE) is LATE
    assert known.answer("b", 1.0, LATE) is LATE


def test_ends_are_forgotten_in_time() -> None:
    clock = Clock()
    known = RememberedCompletions(clock)
    for n in range(100):
        clock.now += COMPLETION_S / 10
        known.answer(f"t{n}", 1.0, DONE)
    assert len(known) == 11, "as many as ended within that time"
    assert known.answer("t99", 1.0, LATE) is DONE
    assert known.answer("t80", 1.0, LATE) is LATE


def test_an_end_that_is_said_again_is_remembered_from_then_on() -> None:
    clock = Clock()
    known = RememberedCompletions(clock)
    known.answer("a", 1.0, DONE)
    for _ in range(3):
        clock.now += COMPLETION_S * 0.9
        known.answer("a", 1.0, DONE)
        known.answer("b", 1.0, DONE)
    assert known.answer("a", 1.0, LATE) is DONE
