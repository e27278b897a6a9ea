"""A rollout under way, and who says when the next may begin: the rollouter's schedule, or agents that play on."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import RolloutRules, RolloutStart, ScheduleState
from headrace.simulate.scenario import Scenario

#: Rows of a dataset that no simulated run comes to the end of.
ENDLESS_ROWS = 2**40
#: What the uids of a simulated run begin with.
RUN = "simulated"


class SimulatedRollout(msgspec.Struct, eq=False):
    """One rollout under way. `turns` are (seconds before the call, new prompt tokens, sampled tokens), `version` is
    that of its first call, -1 before it."""

    uid: str
    prompt: str
    turns: list[tuple[float, int, int]]
    reward_s: float
    server: int
    start: RolloutStart | None = None
    turn: int = 0
    tokens: int = 0
    version: int = -1
    asked_at: float = 0.0


class RolloutName(msgspec.Struct, frozen=True):
    """A rollout that may begin; `start` is the schedule's own name for it."""

    uid: str
    prompt: str
    start: RolloutStart | None = None


class Supply(Protocol):
    """Who says which rollouts begin, told what becomes of them."""

    def next(self, now: float) -> list[RolloutName]:
        """The rollouts that begin now."""
        ...

    def ended(self, rollout: SimulatedRollout) -> None:
        """A rollout is over; it comes to the pool with its reward."""
        ...

    def version_is(self, version: int) -> None:
        """The trainer has published."""
        ...

    def taken(self, prompt: str) -> None:
        """The trainer has taken a prompt's group."""
        ...

    def dropped(self, prompt: str, reason: str) -> None:
        """The pool has dropped a prompt's group."""
        ...


def supply_of(scenario: Scenario) -> Supply:
    """The supply that a scenario names."""
    return DatasetSupply(scenario) if scenario.source == "rollouter" else LiveSupply(scenario)


class DatasetSupply:
    """The rollouter's own schedule over a dataset without an end."""

    def __init__(self, scenario: Scenario) -> None:
        trainer = scenario.trainer
        assert trainer.max_staleness is not None  # a scenario sees to that
        rules = RolloutRules(
            rows=ENDLESS_ROWS,
            n_rollouts=trainer.n_rollouts,
            batch_size=trainer.batch_size,
            max_staleness=trainer.max_staleness,
            concurrency=scenario.agents,
            shuffle=False,
        )
        self._schedule = RolloutSchedule(rules, ScheduleState(RUN, ENDLESS_ROWS))
        self._numbers: dict[str, int] = {}

    def next(self, now: float) -> list[RolloutName]:
        found = self._schedule.next(now)
        for start in found:
            self._numbers[start.prompt_uid] = start.group
        return [RolloutName(start.trajectory_uid, start.prompt_uid, start) for start in found]

    def ended(self, rollout: SimulatedRollout) -> None:
        assert rollout.start is not None
        self._schedule.accepted(rollout.start)

    def version_is(self, version: int) -> None:
        self._schedule.version_is(version)

    def taken(self, prompt: str) -> None:
        self._schedule.taken(self._numbers.pop(prompt))

    def dropped(self, prompt: str, reason: str) -> None:
        if prompt in self._numbers:
            self._schedule.dropped(self._numbers.pop(prompt), reason)


class LiveSupply:
    """Agents that begin another rollout when one ends; with `ahead`, not while so many groups are open or wait."""

    def __init__(self, scenario: Scenario) -> None:
        self._rollouts = scenario.trainer.n_rollouts
        self._ahead = scenario.ahead
        self._free = scenario.agents
        self._groups = 0
        self._waiting: deque[RolloutName] = deque()
        self._standing: set[str] = set()  # prompts that are open, or ready and not taken

    def next(self, now: float) -> list[RolloutName]:
        found: list[RolloutName] = []
        while self._free:
            if not self._waiting and not self._open():
                break
            found.append(self._waiting.popleft())
            self._free -= 1
        return found

    def ended(self, rollout: SimulatedRollout) -> None:
        self._free += 1

    def version_is(self, version: int) -> None:
        pass  # such agents know of none

    def taken(self, prompt: str) -> None:
        self._standing.discard(prompt)

    def dropped(self, prompt: str, reason: str) -> None:
        self._standing.discard(prompt)

    def _open(self) -> bool:
        if self._ahead is not None and len(self._standing) >= self._ahead:
            return False
        prompt = f"{RUN}-{self._groups}"
        self._groups += 1
        self._standing.add(prompt)
        self._waiting.extend(RolloutName(f"{prompt}-{at}", prompt) for at in range(self._rollouts))
        return True
