"""The simulation: rollouts, servers, gateways and a trainer on simulated time, around a real pool.

One heap holds what happens next. A rollout waits for its environment, passes a gateway, is sampled by its server, and
so on until its last turn; then it is submitted as one step that is as old as its first call. The pool decides when
groups are ready and which are dropped, under its own options; the trainer fetches, learns for a while, publishes, and
the pool and the schedule get the new version.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from headrace.data.step import Step
from headrace.pool.config import Limits
from headrace.pool.embedded import DataPool
from headrace.pool.errors import PoolFull
from headrace.simulate.counts import RunCounts
from headrace.simulate.machines import CpuQueue, SharedServer
from headrace.simulate.outcome import Outcome
from headrace.simulate.rollouts import SimulatedRollout, Supply, supply_of
from headrace.simulate.scenario import Scenario

#: The pool's channel.
CHANNEL = "train"
#: Events of the pool that are read at once.
EVENTS_PAGE = 100_000


def simulate(scenario: Scenario) -> Outcome:
    """Plays a scenario for as long as it says. The same scenario has the same outcome."""
    return Simulation(scenario).run()


class Simulation:
    """One run on simulated time, from 0 to `hours`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self._end_s = scenario.hours * 3600
        self._chance = random.Random(scenario.seed)
        self._next: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        times = scenario.servers
        self._servers: list[SharedServer[SimulatedRollout]] = [
            SharedServer(times.token_ms / 1e3, times.call_ms / 1e3, times.max_calls) for _ in range(times.count)
        ]
        self._wakes = [0] * times.count
        self._load = [0] * times.count  # rollouts that stay with each server, for its prefix cache
        self._by_load = [(0, at) for at in range(times.count)]
        self._gateway = CpuQueue(scenario.gateway.processes)
        self._pool_cpu = CpuQueue(1)
        self.pool = DataPool(
            channels={CHANNEL: scenario.channel},
            limits=Limits(events_kept=1_000_000),
            clock=lambda: self.now,
            monotonic=lambda: self.now,
        )
        self._supply: Supply = supply_of(scenario)
        self._counts = RunCounts()
        self._version = 0
        self._waits_since: float | None = 0.0
        self._arrived: Counter[str] = Counter()  # rollouts in the pool, of groups that are not whole
        self._cursor = 0
        self._busy: dict[str, float] = {}

    def run(self) -> Outcome:
        """Plays to the end."""
        half = self._end_s / 2
        self._supply.version_is(0)
        self._at(half, self._begin_to_measure)
        self._begin_rollouts()
        while self._next and self._next[0][0] <= self._end_s:
            self.now, _, act, given = heappop(self._next)
            act(*given)
        self.now = self._end_s
        self._read_drops()
        self.pool.close()
        busy = {name: s / half for name, s in self._busy_s().items()}
        return self._counts.outcome(half, waiting=self._waiting_s(half) / half, busy=busy)

    def _at(self, time: float, act: Callable[..., None], *given: Any) -> None:
        heappush(self._next, (time, next(self._number), act, given))

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def _begin_rollouts(self) -> None:
        for name in self._supply.next(self.now):
            turns, reward_s = self._drawn()
            rollout = SimulatedRollout(name.uid, name.prompt, turns, reward_s, self._least_loaded(), name.start)
            self._at(self.now + rollout.turns[0][0], self._call, rollout)

    def _drawn(self) -> tuple[list[tuple[float, int, int]], float]:
        chance, scenario = self._chance, self.scenario
        if scenario.plays:
            play = chance.choice(scenario.plays)
            return [(turn.wait_s, turn.new_tokens, turn.response_tokens) for turn in play.turns], play.reward_s
        times = scenario.rollouts
        turns = []
        for at in range(max(1, round(times.turns.draw(chance)))):
            new = (times.observation_tokens if at else times.prompt_tokens).draw(chance)
            before = times.environment_s.draw(chance) if at else 0.0
            turns.append((before, round(new), max(1, round(times.response_tokens.draw(chance)))))
        return turns, times.reward_s.draw(chance)

    def _call(self, rollout: SimulatedRollout) -> None:
        rollout.asked_at = self.now
        _, new, sampled = rollout.turns[rollout.turn]
        if rollout.version < 0:
            rollout.version = self._version
        times = self.scenario.gateway
        cpu_s = times.call_ms / 1e3 + times.token_us * sampled / 1e6
        self._at(self._gateway.done_at(self.now, cpu_s), self._sample, rollout, new, sampled)

    def _sample(self, rollout: SimulatedRollout, new: int, sampled: int) -> None:
        server = self._servers[rollout.server]
        server.add(new / self.scenario.servers.prefill_tokens_s, sampled, rollout, self.now)
        self._wake(rollout.server)

    def _wake(self, at: int) -> None:
        """Has a server looked at when its next call ends; a time that was told before no longer counts."""
        self._wakes[at] += 1
        end = self._servers[at].next_end()
        if end is not None:
            self._at(max(end, self.now), self._sampled, at, self._wakes[at])

    def _sampled(self, at: int, wake: int) -> None:
        if wake != self._wakes[at]:
            return
        rollout = self._servers[at].end_one(self.now)
        self._wake(at)
        _, new, sampled = rollout.turns[rollout.turn]
        rollout.tokens += new + sampled
        rollout.turn += 1
        self._counts.called(self.now - rollout.asked_at, sampled)
        if rollout.turn < len(rollout.turns):
            self._at(self.now + rollout.turns[rollout.turn][0], self._call, rollout)
            return
        self._unload(at)
        cpu_s = self.scenario.pool.step_us * len(rollout.turns) / 1e6
        self._at(self._pool_cpu.done_at(self.now + rollout.reward_s, cpu_s), self._submit, rollout)
        self._supply.ended(rollout)
        self._begin_rollouts()

    def _submit(self, rollout: SimulatedRollout) -> None:
        step = Step(
            prompt_ids=[0],
            response_ids=[0],
            rollout_log_probs=[0.0],
            trajectory_uid=rollout.uid,
            prompt_uid=rollout.prompt,
            reward=1.0,
            policy_version=rollout.version,
            is_last=True,
        )
        try:
            taken = self.pool.submit_step(step, CHANNEL, timeout=0).accepted > 0
        except PoolFull:
            taken = False
        self._counts.ended(rollout)
        if not taken:
            self._counts.refused(rollout)
        self._arrived[rollout.prompt] += 1
        if self._arrived[rollout.prompt] == self.scenario.trainer.n_rollouts:
            del self._arrived[rollout.prompt]
            self._read_drops()
            self._fetch()
            self._begin_rollouts()

    def _least_loaded(self) -> int:
        """The server with the fewest rollouts, which stays theirs: it has their prompts cached."""
        while True:
            load, at = heappop(self._by_load)
            if load == self._load[at]:
                self._load[at] += 1
                heappush(self._by_load, (load + 1, at))
                return at

    def _unload(self, at: int) -> None:
        self._load[at] -= 1
        heappush(self._by_load, (self._load[at], at))

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Takes a batch, where the trainer waits for one and it is there."""
        times = self.scenario.trainer
        if self._waits_since is None:
            return
        batch = self.pool.fetch_batch(
            times.batch_size, times.n_rollouts, channel=CHANNEL, max_staleness=times.max_staleness, timeout=0
        )
        self._read_drops()
        if batch is None:
            return
        self._counts.waited(self._waits_since, self.now)
        self._waits_since = None
        tokens = 0
        for group in batch.groups:
            self._supply.taken(group.prompt_uid)
            for trajectory in group.trajectories:
                tokens += self._counts.trained(trajectory.uid, self._version)
        learning_s = times.step_s.draw(self._chance) + (tokens / times.tokens_s if times.tokens_s else 0.0)
        self._at(self.now + learning_s, self._publish)
        self._begin_rollouts()

    def _publish(self) -> None:
        times = self.scenario.trainer
        if times.hold_s:
            for at, server in enumerate(self._servers):
                server.hold(self.now + times.hold_s, self.now)
                self._wake(at)
        self._at(self.now + max(times.sync_s, times.hold_s), self._published)
        self._at(self.now + times.sync_s, self._await_batch)

    def _published(self) -> None:
        self._version += 1
        self.pool.set_version(self._version, channel=CHANNEL)
        self._supply.version_is(self._version)
        self._read_drops()
        self._fetch()
        self._begin_rollouts()

    def _await_batch(self) -> None:
        self._counts.steps += 1
        self._waits_since = self.now
        self._fetch()

    def _read_drops(self) -> None:
        events = self.pool.events(self._cursor, EVENTS_PAGE)
        for event in events:
            self._cursor = event.cursor + 1
            if event.kind == "drop":
                prompt, reason = str(event.detail["group"]), str(event.detail["reason"])
                self._counts.dropped(prompt, reason)
                self._supply.dropped(prompt, reason)

    # -- figures -------------------------------------------------------------------------------------------------------

    def _begin_to_measure(self) -> None:
        self._busy = self._busy_s()
        self._counts.begin_to_measure()

    def _busy_s(self) -> dict[str, float]:
        found = {
            "servers": sum(server.busy_s for server in self._servers) / len(self._servers),
            "gateways": self._gateway.busy_s / self._gateway.processes,
            "pool": self._pool_cpu.busy_s,
        }
        return {name: s - self._busy.get(name, 0.0) for name, s in found.items()}

    def _waiting_s(self, since: float) -> float:
        waits = [*self._counts.waits]
        if self._waits_since is not None:
            waits.append((self._waits_since, self.now))
        return sum(max(0.0, end - max(begin, since)) for begin, end in waits)
