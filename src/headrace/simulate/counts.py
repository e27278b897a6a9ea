"""What is counted while a run is simulated, and the outcome that it comes to."""

from __future__ import annotations

import random
from collections import Counter

from headrace.simulate.outcome import Outcome, Survivors
from headrace.simulate.rollouts import SimulatedRollout

#: Calls whose durations are kept, a random choice of all, for the 99th percentile.
KEPT_DURATIONS = 20_000


class RunCounts:
    """Counters of one run. `begin_to_measure` sets those of the rates to zero: until then a run finds its pace."""

    def __init__(self) -> None:
        self._chance = random.Random(0)
        self._live: dict[str, SimulatedRollout] = {}  # rollouts in the pool, by uid
        self._by_prompt: dict[str, list[str]] = {}
        self._fates: list[tuple[int, bool]] = []
        self._dropped: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []
        self.steps = 0
        self.begin_to_measure()

    def begin_to_measure(self) -> None:
        """Forgets what was counted for rates."""
        self.steps = self._calls = self._sampled = self._ended = self._trained_tokens = 0
        self._durations: list[float] = []
        self._staleness: Counter[int] = Counter()

    def called(self, seconds: float, sampled: int) -> None:
        """A call was answered."""
        self._calls += 1
        self._sampled += sampled
        if len(self._durations) < KEPT_DURATIONS:
            self._durations.append(seconds)
        elif (at := self._chance.randrange(self._calls)) < KEPT_DURATIONS:
            self._durations[at] = seconds

    def ended(self, rollout: SimulatedRollout) -> None:
        """A rollout came to the pool."""
        self._ended += 1
        self._live[rollout.uid] = rollout
        self._by_prompt.setdefault(rollout.prompt, []).append(rollout.uid)

    def refused(self, rollout: SimulatedRollout) -> None:
        """The pool did not take it."""
        self._lose(rollout.uid, "refused")

    def dropped(self, prompt: str, reason: str) -> None:
        """The pool dropped a group."""
        for uid in self._by_prompt.pop(prompt, ()):
            self._lose(uid, reason)

    def trained(self, uid: str, version: int) -> int:
        """A rollout went into a batch of that version. Returns how many tokens it has."""
        rollout = self._live.pop(uid)
        self._by_prompt.pop(rollout.prompt, None)
        self._fates.append((rollout.tokens, True))
        self._staleness[version - rollout.version] += 1
        self._trained_tokens += rollout.tokens
        return rollout.tokens

    def waited(self, since: float, until: float) -> None:
        """The trainer waited for a batch."""
        self.waits.append((since, until))

    def _lose(self, uid: str, reason: str) -> None:
        rollout = self._live.pop(uid, None)
        if rollout is not None:
            self._dropped[reason] += 1
            self._fates.append((rollout.tokens, False))

    def outcome(self, seconds: float, *, waiting: float, busy: dict[str, float]) -> Outcome:
        """The figures of a run that was measured for so long."""
        trained = self._staleness.total()
        durations = sorted(self._durations)
        return Outcome(
            rollouts_s=self._ended / seconds,
            calls_s=self._calls / seconds,
            sampled_tokens_s=self._sampled / seconds,
            trained_tokens_s=self._trained_tokens / seconds,
            steps_h=self.steps / seconds * 3600,
            trainer_waiting=waiting,
            staleness_mean=sum(age * n for age, n in self._staleness.items()) / trained if trained else 0.0,
            staleness_max=max(self._staleness, default=0),
            dropped={reason: n / len(self._fates) for reason, n in sorted(self._dropped.items())},
            survivors=Survivors.of(self._fates),
            busy=busy,
            call_p99_s=durations[int(len(durations) * 0.99)] if durations else 0.0,
        )
