"""A reward tried on what was recorded: how its scores spread, where they tie, what failed and what it cost, and where
an advantage would change its sign against the recorded rewards, or those of another reward. Nothing is changed.

A tied group teaches nothing: all of its rewards are the same. A changed sign teaches the opposite: what was made more
likely would be made less likely. Groups are listed by how far their changed advantages moved, the worst first.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.data.trajectory import Trajectory
from headrace.rewards.config import RewardConfig
from headrace.rewards.recorded import SampleReader
from headrace.rewards.sample import RewardFailure, Score
from headrace.rewards.source import RewardCounters
from headrace.rewards.worker import LocalRewardWorker, RewardWorker

#: Buckets of a histogram of scores.
BUCKETS = 10
#: Failures that are shown in full; the others are counted.
SHOWN_FAILURES = 20
#: Below this difference two rewards are the same: sums of weighted parts differ by rounding.
SAME = 1e-9


class TriedReward(msgspec.Struct, frozen=True):
    """What one reward said of one trajectory: a value, or a failure."""

    value: float | None = None
    failure: RewardFailure | None = None
    parts: dict[str, float] = {}


class ComparedTrajectory(msgspec.Struct, frozen=True):
    """A trajectory with its reward before (recorded, or the old reward's) and after; None where there is none."""

    trajectory_uid: str
    prompt_uid: str
    before: float | None
    after: TriedReward


async def tried(
    trajectories: Sequence[Trajectory], config: RewardConfig, reader: SampleReader
) -> tuple[list[TriedReward], dict[str, float]]:
    """What a reward says of each trajectory, and what that cost: seconds, and a judge's tokens."""
    worker = LocalRewardWorker(config)
    room = asyncio.Semaphore(config.concurrency)

    async def one(trajectory: Trajectory) -> TriedReward:
        async with room:
            return await _tried(trajectory, worker, reader, by_step=config.on == "step")

    try:
        await worker.ready()
        began = time.perf_counter()
        found = await asyncio.gather(*map(one, trajectories))
        seconds = time.perf_counter() - began
    finally:
        await worker.aclose()
    return found, {"seconds": seconds, "seconds_a_trajectory": seconds / max(1, len(found)), **_tokens(worker.counters)}


async def _tried(trajectory: Trajectory, worker: RewardWorker, reader: SampleReader, *, by_step: bool) -> TriedReward:
    try:
        samples = reader.samples(trajectory, by_step=by_step)
    except RewardFailure as failure:
        return TriedReward(failure=failure)
    scores: list[Score] = []
    for found in await worker.score(samples):
        if isinstance(found, RewardFailure):
            return TriedReward(failure=found)
        scores.append(found)
    parts: dict[str, float] = defaultdict(float)
    for score in scores:
        for name, value in score.parts.items():
            parts[name] += value
    return TriedReward(math.fsum(score.value for score in scores), parts=dict(parts))


def _tokens(counters: RewardCounters) -> dict[str, float]:
    """What judges read and wrote, where there are any."""
    read, written = counters.tokens_in, counters.tokens_out
    return {"judge_tokens_in": read, "judge_tokens_out": written} if read or written else {}


def report(rows: Sequence[ComparedTrajectory], *, worst: int) -> dict[str, Any]:
    """All that a trial tells, as plain values; `worst` groups are listed."""
    groups: dict[str, list[ComparedTrajectory]] = defaultdict(list)
    for row in rows:
        groups[row.prompt_uid].append(row)
    failed = [row for row in rows if row.after.failure is not None]
    changes = [found for uid, members in groups.items() if (found := _changes(uid, members)) is not None]
    changed = sorted((found for found in changes if found["changed"]), key=lambda found: -found["distance"])
    return {
        "trajectories": len(rows),
        "groups": len(groups),
        "scored": len(rows) - len(failed),
        "failed": dict(Counter(row.after.failure.reason for row in failed if row.after.failure is not None)),
        "failures": [_failure(row) for row in failed[:SHOWN_FAILURES]],
        "rewards": spread([row.after.value for row in rows]),
        "rewards_before": spread([row.before for row in rows]),
        "parts": {name: spread(values) for name, values in _parts(rows).items()},
        "ties": {
            "groups": sum(len(members) > 1 for members in groups.values()),
            "tied": sum(_tied([row.after.value for row in members]) for members in groups.values()),
            "tied_before": sum(_tied([row.before for row in members]) for members in groups.values()),
        },
        "signs": {
            "trajectories": sum(found["compared"] for found in changes),
            "changed": sum(found["changed"] for found in changes),
            "groups": len(changes),
            "groups_changed": len(changed),
        },
        "worst_groups": changed[:worst],
    }


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """How numbers spread; those that are None are left out."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"count": 0}
    quarters = statistics.quantiles(known, n=4, method="inclusive") if len(known) > 1 else [known[0]] * 3
    low, high = known[0], known[-1]
    width = (high - low) / BUCKETS
    counts = Counter(min(int((value - low) / width), BUCKETS - 1) if width else 0 for value in known)
    return {
        "count": len(known),
        "mean": statistics.fmean(known),
        "deviation": statistics.pstdev(known),
        "min": low,
        "quarter": quarters[0],
        "median": quarters[1],
        "three_quarters": quarters[2],
        "max": high,
        "histogram": [counts[bucket] for bucket in range(BUCKETS if width else 1)],
    }


def advantages(rewards: Sequence[float]) -> list[float]:
    """A group's rewards less their mean, over their deviation, as GRPO has it; zeros where all are the same."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / deviation if deviation > SAME else 0.0 for reward in rewards]


def _changes(prompt_uid: str, members: Sequence[ComparedTrajectory]) -> dict[str, Any] | None:
    """A group with both advantages of its trajectories; None where fewer than two have both rewards."""
    both = [
        (row.trajectory_uid, row.before, row.after.value)
        for row in members
        if row.before is not None and row.after.value is not None
    ]
    if len(both) < 2:
        return None
    before = advantages([value for _, value, _ in both])
    after = advantages([value for _, _, value in both])
    rows = [
        {
            "trajectory_uid": uid,
            "before": old,
            "after": new,
            "advantage_before": first,
            "advantage_after": second,
            "changed": first * second < 0,
        }
        for (uid, old, new), first, second in zip(both, before, after, strict=True)
    ]
    moved = [abs(a - b) for a, b in zip(before, after, strict=True) if a * b < 0]
    return {
        "prompt_uid": prompt_uid,
        "compared": len(rows),
        "changed": len(moved),
        "distance": math.fsum(moved),
        "trajectories": sorted(rows, key=lambda row: -abs(row["advantage_before"] - row["advantage_after"])),
    }


def _tied(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return len(known) > 1 and max(known) - min(known) <= SAME


def _parts(rows: Sequence[ComparedTrajectory]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.after.parts.items():
            found[name].append(value)
    return found


def _failure(row: ComparedTrajectory) -> dict[str, Any]:
    failure = row.after.failure
    assert failure is not None
    return {
        "trajectory_uid": row.trajectory_uid,
        "reason": failure.reason,
        "source": failure.source,
        "detail": failure.detail,
    }
