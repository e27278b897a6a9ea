"""Figures out of what the index, the pool's stats and a trainer's metrics say. Pure, but for `MetricsFile`."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.dashboard.earned import advantages_of
from headrace.dashboard.index import PRESENT, TrajectoryIndex
from headrace.dashboard.records import GroupRecord, SurvivorRow, SurvivorTable, TrajectoryRecord

Row = dict[str, Any]

#: A chart's series, by the fields of the trainer's rows.
CURVES = {
    "reward": ("reward",),
    "staleness": ("staleness_mean", "staleness_max"),
    "entropy": ("entropy",),
    "log-prob gap": ("logprob_gap_mean", "logprob_gap_max"),
}
#: Points of a curve; longer ones are thinned. More than a screen has columns.
MAX_POINTS = 2_000
#: Rows of metrics that are kept: of a longer run the first are forgotten.
MAX_METRICS_ROWS = 50_000
#: Bytes of a metrics file that are read at a time.
METRICS_SLICE = 1 << 20
#: Seconds over which rates are taken.
RATE_WINDOW_S = 60.0
#: Shares of two ranges that differ by more are warned of, where both have so many settled trajectories.
UNEQUAL_SHARES, ENOUGH_SETTLED = 0.25, 20

#: By which measures survivors are told apart: the index's column, by the words for it.
MEASURES = {"tokens sampled": "tokens", "turns": "steps", "reward": "reward"}


class MetricsFile:
    """The rows of a trainer's `metrics.jsonl`, read as it grows; it need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._inode = 0
        self._rows: deque[dict[str, float]] = deque(maxlen=MAX_METRICS_ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    def refresh(self) -> bool:
        """Reads what came since; whether there is more to read. A file that became shorter is read anew."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size < self._at or found.st_ino != self._inode:
                    self._at, self._inode = 0, found.st_ino
                    self._rows.clear()
                file.seek(self._at)
                data = file.read(METRICS_SLICE)
        except FileNotFoundError:
            return False
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                self._rows.append({k: v for k, v in row.items() if type(v) in (int, float)})
        return len(data) == METRICS_SLICE and bool(whole)

    def curves(self) -> dict[str, Any]:
        """The charts: `{"reward": {"step": [...], "reward": [...]}, ...}`, at most `MAX_POINTS` points each."""
        rows = list(self._rows)
        rows = rows[:: math.ceil(len(rows) / MAX_POINTS) or 1]
        found = {}
        for chart, fields in CURVES.items():
            having = [row for row in rows if any(field in row for field in fields)]
            if having:
                found[chart] = {name: [row.get(name) for row in having] for name in ("step", *fields)}
        return found


class LedgerRates:
    """Steps a second over the last minute, of what the ledger counted."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, at: float, ledger: Mapping[str, Any]) -> dict[str, float]:
        """Takes the ledger as it is at a time; returns the rates up to it."""
        now = (at, ledger.get("submitted", 0), ledger.get("consumed", 0))
        if self._seen and (now[1] < self._seen[-1][1] or at <= self._seen[-1][0]):
            self._seen.clear()  # another pool than before
        self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1][0] <= at - RATE_WINDOW_S:
            self._seen.popleft()
        first = self._seen[0]
        seconds = at - first[0]
        if seconds <= 0:
            return {"submitted": 0.0, "consumed": 0.0}
        return {"submitted": (now[1] - first[1]) / seconds, "consumed": (now[2] - first[2]) / seconds}


def waits(channels: Mapping[str, Row], servers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who waits for whom, in sentences; none where all goes on."""
    said = []
    for server in servers:
        if server.get("state") not in ("up", "ready", "healthy", None):
            said.append(
                f"Rollout server {server.get('address')} is {server.get('state')}: {server.get('reason') or '?'}"
            )
    for name, row in channels.items():
        groups, bound = row["groups"], row["config"].get("max_queue_size")
        if row["closed"]:
            said.append(f"Channel {name} is shut down: it takes no more steps.")
        if bound and groups["queued"] >= bound:
            said.append(
                f"Channel {name} is full ({groups['queued']} of {bound} groups): agents are ahead of the trainer."
            )
        elif groups["ready"] and not row["leases"]:
            ready = _count(groups["ready"], "group")
            said.append(f"Channel {name}: {ready} ready, and none is leased: they wait for the trainer.")
        elif groups["queued"] and not groups["ready"]:
            said.append(
                f"Channel {name}: {_count(groups['queued'], 'group')} begun, none ready: the trainer waits for agents."
            )
    return said


def group_record(
    trajectories: list[TrajectoryRecord], row: Mapping[str, Any] | None, parts: Sequence[dict[str, float]] = ()
) -> GroupRecord:
    """A group of trajectories, at least one; `row` is the pool's own, where the group is there; `parts` those of the
    trajectories' rewards, where they were read."""
    first = trajectories[0]
    rewards = [one.reward for one in trajectories if one.reward is not None]
    mean = float(np.mean(rewards)) if rewards else None
    states = {one.state for one in trajectories}
    state = row["state"] if row else states.pop() if len(states) == 1 else "mixed"
    return GroupRecord(
        prompt_uid=first.prompt_uid,
        channel=first.channel,
        state=state,
        n_rollouts=row["n_rollouts"] if row else None,
        trajectories=trajectories,
        mean=mean,
        spread=float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0 if rewards else None,
        waits_for=_waits_for(trajectories, row) if row and row["state"] == "waiting" else None,
        advantages=advantages_of([one.reward for one in trajectories]),
        parts=list(parts),
    )


def survivors(index: TrajectoryIndex) -> list[SurvivorTable]:
    """What was submitted against what a trainer took, by each measure; ranges that hold nothing are left out."""
    found = []
    for words, column in MEASURES.items():
        values, consumed, dropped = index.measured(column)
        known = ~np.isnan(values)
        values, consumed, dropped = values[known], consumed[known], dropped[known]
        rows = []
        for low, high, label in _ranges(values, column):
            inside = (values >= low) & (values < high)
            if inside.any():
                rows.append(_survivor_row(label, inside, consumed, dropped))
        found.append(SurvivorTable(words, rows, _unequal(words, rows)))
    return [*found, _by_channel(index)]


def _by_channel(index: TrajectoryIndex) -> SurvivorTable:
    """Environments and kinds of agents feed channels of their own."""
    _, consumed, dropped = index.measured("steps")
    names, numbers = index.channels()
    rows = []
    for number, name in enumerate(names):
        inside = numbers == number
        if inside.any():
            rows.append(_survivor_row(name, inside, consumed, dropped))
    return SurvivorTable("channel", rows if len(rows) > 1 else [], _unequal("channel", rows))


def _survivor_row(label: str, inside: Any, consumed: Any, dropped: Any) -> SurvivorRow:
    taken, lost = int((inside & consumed).sum()), int((inside & dropped).sum())
    share = taken / (taken + lost) if taken + lost else None
    return SurvivorRow(label, int(inside.sum()), taken, lost, share)


def _ranges(values: Any, column: str) -> list[tuple[float, float, str]]:
    """Powers of two for counts, eight equal parts for rewards."""
    if not len(values):
        return []
    if column == "reward":
        low, high = float(values.min()), float(values.max())
        edges = np.linspace(low, high, 9) if high > low else np.array([low, low])
        ends = [*edges[1:-1], np.inf]
        return [(a, b, f"{a:.3g} to {e:.3g}") for a, b, e in zip(edges[:-1], ends, edges[1:], strict=True)]
    powers = range(int(values.max()).bit_length() + 1)
    found = [(0.0, 1.0, "0")]
    for power in powers:
        low_count, high_count = 2**power, 2 ** (power + 1)
        label = str(low_count) if power == 0 else f"{low_count} to {high_count - 1}"
        found.append((float(low_count), float(high_count), label))
    return found


def _unequal(measure: str, rows: Sequence[SurvivorRow]) -> str | None:
    settled = [row for row in rows if row.share is not None and row.consumed + row.dropped >= ENOUGH_SETTLED]
    if len(settled) < 2:
        return None
    least, most = min(settled, key=lambda row: row.share or 0.0), max(settled, key=lambda row: row.share or 0.0)
    if (most.share or 0.0) - (least.share or 0.0) <= UNEQUAL_SHARES:
        return None
    return (
        f"By {measure}, {least.share:.0%} of {least.label} were trained on, and {most.share:.0%} of {most.label}: "
        "what is learned from is not what agents did."
    )


def _waits_for(trajectories: Sequence[TrajectoryRecord], row: Mapping[str, Any]) -> str:
    present = [one for one in trajectories if one.state in PRESENT]
    missing, unended = row["n_rollouts"] - len(present), sum(not one.complete for one in present)
    unrewarded = sum(one.complete and one.reward is None for one in present)
    parts = []
    if missing > 0:
        parts.append(f"{missing} of {row['n_rollouts']} trajectories have not begun")
    if unended:
        parts.append(f"{_count(unended, 'trajectory')} not ended")
    if unrewarded:
        parts.append(f"{_count(unrewarded, 'trajectory')} without a reward")
    return "; ".join(parts) or "its trajectories are complete; the channel asks for more"


def _count(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
