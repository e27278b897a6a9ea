"""A rollouter's schedule with a trainer and rollouts of random length, on a clock that is only counted."""

from __future__ import annotations

import random
from collections import Counter
from heapq import heappop, heappush
from itertools import count
from typing import Any

import msgspec

from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import TRAIN, RolloutRules, RolloutStart, ScheduleState

#: Events of a run after which it is taken for one that never ends.
MOST_EVENTS = 100_000


class Simulation:
    """One run. The trainer takes the oldest groups that are ready, one batch ahead of the one it learns from."""

    def __init__(
        self,
        rules: RolloutRules,
        seed: int,
        *,
        failing: float = 0.0,
        kills: float = 0.0,
        drops: float = 0.0,
        crashes: float = 0.0,
        checkpoint_every: int = 1,
        kind: Any = RolloutSchedule,
    ) -> None:
        self.rules, self.rng, self.failing, self.kills = rules, random.Random(seed), failing, kills
        self.kind, self.drops = kind, drops
        self.crashes, self.checkpoint_every = crashes, checkpoint_every
        self.schedule = kind(rules, ScheduleState("r", rules.rows, rules.val_rows))
        self.saved = msgspec.json.encode(self.schedule.state)
        self.now = 0.0
        self.version = 0
        #: What the pool holds: complete attempts by uid, and each group's number, rollouts and oldest version.
        self.complete: dict[str, RolloutStart] = {}
        self.oldest: dict[str, int] = {}
        self.ready: dict[int, str] = {}
        self.taken: set[str] = set()
        self.dropped: set[str] = set()
        self.queued: list[list[str]] = []
        self.training = False
        #: What the trainer has learned from since its last checkpoint, and will again if it dies; how often it did.
        self.at_risk: list[list[str]] = []
        self.deaths = 0
        #: The first version of the trainer that lives.
        self.reborn = 0
        #: Of each group that was trained on, how many versions it was behind; of those that began after the trainer's
        #: last death, apart.
        self.staleness: list[int] = []
        self.staleness_since: list[int] = []
        self.most_running = 0
        self.started: list[RolloutStart] = []
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = count()
        self._life = 0

    def run(self) -> Simulation:
        """Until the schedule has finished and the trainer has nothing to learn from."""
        self._at(0.0, "poll", None)
        for _ in range(MOST_EVENTS):
            self._train()
            self._start()
            if self.schedule.finished and not self.training and not self._enough():
                return self
            self.now, _, kind, what = heappop(self._events)
            getattr(self, f"_{kind}")(what)
            if self.kills and self.rng.random() < self.kills:
                self._kill()
            if self.crashes and self.rng.random() < self.crashes:
                self._crash()
        raise AssertionError(f"it never ended: {self.schedule.state}")

    def _at(self, delay: float, kind: str, what: Any) -> None:
        heappush(self._events, (self.now + delay, next(self._order), kind, what))

    def _start(self) -> None:
        for start in self.schedule.next(self.now):
            self.started.append(start)
            self.oldest[start.prompt_uid] = min(self.oldest.get(start.prompt_uid, self.version), self.version)
            self._at(self._long(), "end", (self._life, start))
        if self.schedule.changed:
            self.saved = msgspec.json.encode(self.schedule.state)
            self.schedule.changed = False
        self.most_running = max(self.most_running, self.schedule.running)

    def _long(self) -> float:
        """Mostly short; one in ten is twenty times as long."""
        return self.rng.expovariate(1.0) * (20.0 if self.rng.random() < 0.1 else 1.0)

    def _end(self, what: tuple[int, RolloutStart]) -> None:
        life, start = what
        if life != self._life:
            return  # its process is gone
        if self.rng.random() < self.failing:
            lost = self.schedule.failed(start, "crashed", self.now)
            if lost is not None:
                for other in lost.complete:
                    del self.complete[other.trajectory_uid]
                for other in lost.running:
                    self.schedule.failed(other, "group", self.now, charged=False)
            return
        if start.group not in self.schedule.state.open:
            return  # ended with its group
        self.complete[start.trajectory_uid] = start
        self._maybe_ready(start)
        self.schedule.accepted(start)

    def _maybe_ready(self, start: RolloutStart) -> None:
        whole = [other for other in self.complete.values() if other.prompt_uid == start.prompt_uid]
        gone = self.taken | self.dropped
        if len(whole) == start.n_rollouts and start.channel == TRAIN and start.prompt_uid not in gone:
            self._at(self._long() if self.rules.scored else 0.0, "score", start)
            if not self.rules.scored:
                self.ready[start.group] = start.prompt_uid

    def _score(self, start: RolloutStart) -> None:
        if start.prompt_uid in self.dropped:
            return
        self.ready.setdefault(start.group, start.prompt_uid)
        if start.prompt_uid in self.taken:
            del self.ready[start.group]
        if self.rules.scored:
            self.schedule.scored(start.group)

    def _poll(self, _: None) -> None:
        self.schedule.version_is(self.version)
        for number, starts in self.schedule.in_pool().items():
            assert all(start.trajectory_uid in self.complete for start in starts), "it asks for what is not complete"
            if starts[0].prompt_uid in self.dropped:
                self.schedule.dropped(number, "stale")
            elif starts[0].prompt_uid in self.taken:
                with_trainer = self._is_with_trainer(starts[0].prompt_uid)
                self.schedule.leased(number, with_trainer)
                if not with_trainer:
                    self.schedule.taken(number)
            else:
                self.schedule.leased(number, False)
        self.schedule.waiting_is(len(self.ready))
        for number in [number for number in self.ready if self.rng.random() < self.drops]:
            self.dropped.add(self.ready.pop(number))
        self._at(self.rng.expovariate(2.0), "poll", None)

    def _enough(self) -> bool:
        return len(self.ready) >= self.rules.batch_size or bool(self.queued)

    def _train(self) -> None:
        while len(self.queued) < 1 and len(self.ready) >= self.rules.batch_size:
            first = sorted(self.ready)[: self.rules.batch_size]
            self.queued.append([self.ready.pop(number) for number in first])
            self.taken.update(self.queued[-1])
        if self.queued and not self.training:
            self.training = True
            batch = self.queued.pop(0)
            self.at_risk.append(batch)
            self.staleness += [self.version - self.oldest[uid] for uid in batch]
            self.staleness_since += [self.version - self.oldest[u] for u in batch if self.oldest[u] >= self.reborn]
            self._at(self._long(), "trained", self.deaths)

    def _trained(self, deaths: int) -> None:
        if deaths != self.deaths:
            return  # the one that was at it is dead
        self.version += 1
        self.training = False
        if self.version % self.checkpoint_every == 0:
            self.at_risk = []

    def _crash(self) -> None:
        """The trainer is killed: what it has and had since its checkpoint is in the pool again, and another goes on
        under the next version."""
        self.deaths += 1
        numbers = {start.prompt_uid: start.group for start in self.complete.values()}
        for uid in (uid for batch in [*self.at_risk, *self.queued] for uid in batch):
            self.taken.discard(uid)
            self.ready[numbers[uid]] = uid
        self.at_risk, self.queued, self.training = [], [], False
        self.version += 1
        self.reborn = self.version
        self.staleness_since = []

    def _is_with_trainer(self, uid: str) -> bool:
        return any(uid in batch for batch in [*self.at_risk, *self.queued])

    def _kill(self) -> None:
        """The rollouter is killed, and another goes on from what was saved; the pool's word settles what was open."""
        self._life += 1
        state = msgspec.json.decode(self.saved, type=ScheduleState)
        self.schedule = self.kind(self.rules, state)
        self.schedule.version_is(self.version)
        for start in self.schedule.in_doubt():
            known = [other for other in self.complete.values() if _same(other, start)]
            if known:
                self.schedule.accepted(known[0])
            else:
                begun = [other.attempt for other in self.started if _same(other, start)]
                self.schedule.resumed(start, max(begun, default=-1) + 1)
        for number, starts in self.schedule.awaits_scores().items():
            if starts[0].prompt_uid in self.taken or number in self.ready:
                self.schedule.scored(number)

    def played(self) -> Counter[tuple[str, int]]:
        """How often each rollout of each prompt of the training data is complete."""
        return Counter((start.prompt_uid, start.rollout) for start in self.complete.values() if start.channel == TRAIN)


def _same(one: RolloutStart, other: RolloutStart) -> bool:
    return (one.prompt_uid, one.rollout) == (other.prompt_uid, other.rollout)
