"""A scenario out of a run that was recorded: its rollouts as they were, and the pace of its servers and trainer.

What a run's journal still holds tells its rollouts (when each call began and ended, its tokens, when the reward came),
how many ran at once, and when batches were taken; the trainer's `metrics.jsonl` tells how long its steps took. The
run's own rates are measured from the same files, over the second half of it, so that a simulation of the run as it was
can be held against them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import orjson

from headrace.data.errors import InvalidInput
from headrace.data.trajectory import Trajectory
from headrace.pool import facts as f
from headrace.pool.readonly import JournalView
from headrace.run.progress import METRICS
from headrace.run.services import JOURNAL, TRAINER
from headrace.simulate.scenario import (
    GatewayTimes,
    Play,
    PoolTimes,
    RecordedTurn,
    Scenario,
    ServerTimes,
    Spread,
    TrainerTimes,
)

#: Rollouts that a scenario draws from; of more, an even choice is taken.
MOST_PLAYS = 2000
#: Rollouts and training steps below which a run tells too little.
FEWEST_ROLLOUTS, FEWEST_STEPS = 20, 4
#: A prefill rate that takes no time: what prompts took is in the recorded pace.
FREE_PREFILL = 1e12


class TimedCall(msgspec.Struct, frozen=True):
    """One call as the gateway timed it."""

    server: str
    began: float
    ended: float
    new_tokens: int
    response_tokens: int


class Rates(msgspec.Struct, frozen=True):
    """What a run did, under the names of an `Outcome`."""

    rollouts_s: float
    calls_s: float
    sampled_tokens_s: float
    steps_h: float
    trainer_waiting: float
    staleness_mean: float


class RecordedRun(msgspec.Struct, frozen=True):
    """A recorded run: the scenario that describes it, and what it really did."""

    scenario: Scenario
    rates: Rates


def recorded(run: Path, channel: str = "train") -> RecordedRun:
    """The run in a folder of `headrace run` or `headrace demo`; one that still runs is read as it is now. Raises
    `InvalidInput` where it tells too little, `PoolError` where its journal cannot be read."""
    rows = _metrics(run / TRAINER / METRICS)
    journal = _Timed(run / JOURNAL, channel)
    with journal:
        held = [found for found in journal.trajectories() if found.complete]
        rollouts = {found.uid: made for found in held if (made := _calls(found))}
        config, left_at = journal.config, journal.left_at()
    if len(rollouts) < FEWEST_ROLLOUTS:
        raise InvalidInput(
            f"{run / JOURNAL} holds {len(rollouts)} complete rollouts; a recorded run needs {FEWEST_ROLLOUTS}"
        )
    calls = sorted((call for made in rollouts.values() for call in made), key=lambda call: call.began)
    begin, end = calls[0].began, max(call.ended for call in calls)
    half = (begin + end) / 2
    busy = [(made[0].began, made[-1].ended) for made in rollouts.values() if made[-1].ended > half]
    begun_at: dict[str, float] = {}
    for found in held:
        if found.uid in rollouts:
            at = rollouts[found.uid][0].began
            begun_at[found.prompt_uid] = min(begun_at.get(found.prompt_uid, at), at)
    standing = [(at, left_at.get(prompt, end)) for prompt, at in begun_at.items()]
    groups = Counter(int(row["groups"]) for row in rows)
    trainer = TrainerTimes(
        batch_size=groups.most_common(1)[0][0],
        n_rollouts=config.n_rollouts,
        max_staleness=config.max_staleness,
        step_s=Spread(samples=tuple(_learning_s(row) for row in rows)),
        tokens_s=None,
        sync_s=fmean(row["times"].get("publish", 0.0) for row in rows),
        hold_s=fmean((row.get("sync") or {}).get("hold_ms", 0.0) / 1e3 for row in rows),
    )
    scenario = Scenario(
        agents=most_at_once(busy, half),
        source="live",
        ahead=max(most_at_once(standing, half), trainer.batch_size),
        hours=(end - begin) / 3600,
        plays=tuple(_plays(rollouts, journal)),
        servers=server_times(calls),
        gateway=GatewayTimes(call_ms=0.0),  # what it took is in the recorded pace
        pool=PoolTimes(max_queue_size=config.max_queue_size, overflow=config.overflow),
        trainer=trainer,
    )
    return RecordedRun(scenario, _rates(rollouts, rows, half, end))


class _Timed(JournalView):
    """A journal read with the times of what happened to its groups and rollouts."""

    def __init__(self, directory: Path, channel: str) -> None:
        self._channel = channel
        self.completed_at: dict[str, float] = {}
        self.rewarded_at: dict[str, float] = {}
        self._left_at: dict[int, float] = {}
        super().__init__(directory, live=True, consumed=True)

    @property
    def config(self) -> Any:
        return self._state.look(self._channel).config

    def trajectories(self) -> Iterable[Trajectory]:
        """All that the journal still holds."""
        yield from self.consumed(self._channel)
        for uid in list(self._state.look(self._channel).trajectories):
            yield self.trajectory(uid, channel=self._channel)

    def left_at(self) -> dict[str, float]:
        """When each group was handed out first, or dropped, by its prompt."""
        there = self._state.look(self._channel)
        uids = {number: group.uid for number, group in {**there.history, **there.groups}.items()}
        return {uids[number]: at for number, at in self._left_at.items() if number in uids}

    def _replayed(self, facts: Sequence[f.Fact]) -> Sequence[f.Fact]:
        for fact in facts:
            if fact.channel == self._channel:
                self._note(fact)
        return super()._replayed(facts)

    def _note(self, fact: f.Fact) -> None:
        if isinstance(fact, f.Completed):
            self.completed_at[fact.trajectory] = fact.at
        elif isinstance(fact, f.Scored) or (isinstance(fact, f.Amended) and fact.reward is not None):
            self.rewarded_at[fact.trajectory] = fact.at
        elif isinstance(fact, f.HandedOut | f.Dropped):
            for number in fact.groups:
                self._left_at.setdefault(number, fact.at)


def most_at_once(spans: Sequence[tuple[float, float]], since: float) -> int:
    """How many of (begin, end) overlap at most, after a time."""
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = standing = 0
    for at, by in edges:
        standing += by
        if at >= since:
            most = max(most, standing)
    return most


def server_times(calls: Sequence[TimedCall]) -> ServerTimes:
    """The servers' pace, from how long calls took for a token beside how many others: a line through the medians. Where
    the number of calls hardly varied, all of it is the batch's: twice as many calls take twice as long."""
    servers = sorted({call.server for call in calls})
    paces: dict[int, list[float]] = {}
    for server in servers:
        own = [call for call in calls if call.server == server]
        for call, others in zip(own, overlapping([(call.began, call.ended) for call in own]), strict=True):
            paces.setdefault(others, []).append((call.ended - call.began) / call.response_tokens)
    points = [(n, median(found), len(found)) for n, found in paces.items()]
    fixed, each = weighted_line(points)
    return ServerTimes(
        count=len(servers),
        token_ms=fixed * 1e3,
        call_ms=each * 1e3,
        prefill_tokens_s=FREE_PREFILL,
        max_calls=1_000_000,
    )


def overlapping(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each span, how many stand at its middle, itself included."""
    begins, ends = sorted(begin for begin, _ in spans), sorted(end for _, end in spans)
    middles = [(begin + end) / 2 for begin, end in spans]
    return [max(1, bisect_right(begins, at) - bisect_right(ends, at)) for at in middles]


def weighted_line(points: Sequence[tuple[int, float, int]]) -> tuple[float, float]:
    """The line a + b * n nearest to points (n, y, weight), with neither part below 0."""
    whole = sum(weight for _, _, weight in points)
    mean_n = sum(n * weight for n, _, weight in points) / whole
    mean_y = sum(y * weight for _, y, weight in points) / whole
    spread = sum(weight * (n - mean_n) ** 2 for n, _, weight in points)
    if spread == 0:
        return 0.0, mean_y / mean_n
    each = sum(weight * (n - mean_n) * (y - mean_y) for n, y, weight in points) / spread
    each = min(max(each, 0.0), mean_y / mean_n)
    return max(mean_y - each * mean_n, 0.0), each


def _metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InvalidInput(
            f"{path} is not there; give the folder of a run, as headrace run and headrace demo make them"
        )
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    rows = [row for row in rows if row.get("times") and row.get("groups")]
    if len(rows) < FEWEST_STEPS:
        raise InvalidInput(f"{path} has {len(rows)} training steps; a recorded run needs {FEWEST_STEPS}")
    return rows[1:]  # the first step compiles and warms up


def _learning_s(row: dict[str, Any]) -> float:
    times = row["times"]
    return max(0.0, float(row["seconds"]) - float(times.get("wait", 0)) - float(times.get("publish", 0)))


def _calls(trajectory: Trajectory) -> list[TimedCall]:
    """A rollout's calls in the order in which they began; none where one was not timed."""
    found: list[TimedCall] = []
    for (_, record), step in zip(sorted(trajectory.tree.records.items()), trajectory.own_steps, strict=True):
        timings = step.metadata.get("timings")
        if not isinstance(timings, dict) or step.created_at is None:
            return []
        found.append(
            TimedCall(
                server=str(step.metadata.get("server", "")),
                began=step.created_at - float(timings["total_s"]),
                ended=step.created_at,
                new_tokens=record.head.n_prompt,
                response_tokens=len(step.response_ids),
            )
        )
    return sorted(found, key=lambda call: call.began)


def _plays(rollouts: dict[str, list[TimedCall]], journal: _Timed) -> Iterable[Play]:
    every = max(1, -(-len(rollouts) // MOST_PLAYS))
    for uid, calls in list(rollouts.items())[::every]:
        waits = [0.0, *(max(0.0, call.began - before.ended) for before, call in pairwise(calls))]
        turns = tuple(
            RecordedTurn(wait_s=wait, new_tokens=call.new_tokens, response_tokens=call.response_tokens)
            for wait, call in zip(waits, calls, strict=True)
        )
        ended = journal.completed_at.get(uid, calls[-1].ended)
        yield Play(turns=turns, reward_s=max(0.0, journal.rewarded_at.get(uid, ended) - ended))


def _rates(rollouts: dict[str, list[TimedCall]], rows: Sequence[dict[str, Any]], half: float, end: float) -> Rates:
    seconds = end - half
    late = [call for calls in rollouts.values() for call in calls if call.ended > half]
    steps = _last_steps(rows, seconds)
    took = sum(row["seconds"] for row in steps)
    return Rates(
        rollouts_s=sum(calls[-1].ended > half for calls in rollouts.values()) / seconds,
        calls_s=len(late) / seconds,
        sampled_tokens_s=sum(call.response_tokens for call in late) / seconds,
        steps_h=len(steps) / took * 3600,
        trainer_waiting=sum(row["times"].get("wait", 0.0) for row in steps) / took,
        staleness_mean=fmean(row["staleness_mean"] for row in steps),
    )


def _last_steps(rows: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The steps that the last seconds of a run were spent on."""
    found: list[dict[str, Any]] = []
    for row in reversed(rows):
        found.append(row)
        seconds -= row["seconds"]
        if seconds <= 0:
            break
    return found
