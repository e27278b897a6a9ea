"""What agents and the consumer saw with their own eyes: what the pool is held to."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.data.errors import HeadraceError
from headrace.data.step import Step

Key = tuple[str, int]
Tokens = tuple[tuple[int, ...], tuple[int, ...]]


class Score:
    """Every step whose submit was answered, every step of a batch whose ack was, and how often one came twice."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted  # groups
        self.acknowledged: dict[Key, Tokens] = {}
        self.consumed: dict[Key, Tokens] = {}
        self.games = self.hits = self.groups = self.redelivered = self.twice = 0
        self.error: BaseException | None = None
        self.holding = False  # the consumer has a leased batch in hand and keeps it
        self._moved = threading.Condition()

    def sent(self, step: Step) -> None:
        with self._moved:
            self.acknowledged[_key(step)] = _tokens(step)
            self.games += step.is_last
            self.hits += step.reward == 1.0
            self._moved.notify_all()

    def took(self, steps: list[Step], groups: int, redelivered: int) -> None:
        with self._moved:
            self.twice += sum(_key(step) in self.consumed for step in steps)
            self.consumed.update((_key(step), _tokens(step)) for step in steps)
            self.groups += groups
            self.redelivered += redelivered
            self._moved.notify_all()

    def hold(self, until: threading.Event) -> None:
        """The consumer keeps what it has until it is told to go on."""
        with self._moved:
            self.holding = True
            self._moved.notify_all()
        until.wait()

    def failed(self, error: BaseException) -> None:
        with self._moved:
            self.error = self.error or error
            self._moved.notify_all()

    def wait(self, until: Callable[[], bool], what: str, timeout: float) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self.error is not None or until(), timeout)
            if self.error is not None:
                raise self.error
            if not until():
                raise HeadraceError(f"the demo waited {timeout:g} s in vain for {what}")

    def lost(self) -> int:
        """Acknowledged steps that nobody was handed, or that came with other tokens than were sent."""
        return sum(self.consumed.get(key) != tokens for key, tokens in self.acknowledged.items())


def _key(step: Step) -> Key:
    assert step.step_index is not None
    return step.trajectory_uid, step.step_index


def _tokens(step: Step) -> Tokens:
    return tuple(step.prompt_ids.tolist()), tuple(step.response_ids.tolist())
