"""Who took what: the batches of a journal, as a page of them, and the history that they come from, kept up to date."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.dashboard.history import JournalHistory, read_history
from headrace.dashboard.history_records import SeenBatch
from headrace.dashboard.source import PoolSource, fingerprint

#: The share of the time that reading a journal takes, so that a gateway that serves this dashboard goes on.
READING_SHARE = 0.25
#: Seconds of reading between two rests: a thread that computes for longer makes an event loop wait.
READING_SLICE_S = 0.004
#: A journal that changed is read again after so many times the seconds that reading it took.
REREAD_FACTOR = 5.0


class BatchRecord(msgspec.Struct, frozen=True):
    """One batch in a row. `again` counts groups or steps that had been out before; `name` is what `why` knows it by."""

    number: int
    name: str
    channel: str
    state: str
    at: float
    ended_at: float | None
    deadline: float | None
    groups: int
    trajectories: int
    steps: int
    tokens: int
    again: int
    reward: float | None
    versions: tuple[int, int] | None


class ConsumptionPage(msgspec.Struct, frozen=True):
    """Batches, newest first. `journal` is False where the pool has none that can be read here: then `events` are all
    that is known."""

    journal: bool
    rows: list[BatchRecord]
    total: int
    states: dict[str, int]
    redelivered: int
    late_rewards: int
    events: list[dict[str, Any]]
    read_at: float | None = None


class HistoryKeeper:
    """The history of a source's journal: read when it is asked for, and again when the journal changed. For one thread,
    which may be busy for seconds."""

    def __init__(
        self,
        source: PoolSource,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source, self._clock, self._sleep = source, clock, sleep
        self._history: JournalHistory | None = None
        self._seen: tuple[Any, ...] = ()
        self._next_reading = 0.0
        self._slice_begun = 0.0
        self.read_at: float | None = None
        #: Whether reading leaves most of the time to others.
        self.rests = True

    def get(self) -> JournalHistory | None:
        """The history; None where there is no journal to read. Raises `JournalError` where it cannot be read."""
        folder = self._source.journal
        if folder is None:
            return None
        if self._history is not None and self._clock() < self._next_reading:
            return self._history
        found = fingerprint(folder)
        if self._history is None or found != self._seen:
            begun = self._slice_begun = self._clock()
            self._history = read_history(folder, self._rest)
            self._seen, self.read_at = found, time.time()
            self._next_reading = self._clock() + REREAD_FACTOR * (self._clock() - begun)
        return self._history

    def _rest(self) -> None:
        spent = self._clock() - self._slice_begun
        if self.rests and spent >= READING_SLICE_S:
            self._sleep(spent * (1.0 / READING_SHARE - 1.0))
            self._slice_begun = self._clock()


def consumption(
    history: JournalHistory | None, offset: int, limit: int, *, events: list[dict[str, Any]], read_at: float | None
) -> ConsumptionPage:
    """A page of batches, newest first."""
    if history is None:
        return ConsumptionPage(False, [], 0, {}, 0, 0, events[::-1])
    total = len(history.batches)
    shown = history.batches[max(0, total - offset - limit) : max(0, total - offset)][::-1]
    return ConsumptionPage(
        True,
        [_row(history, batch) for batch in shown],
        total,
        dict(Counter(batch.state for batch in history.batches)),
        sum(batch.again for batch in history.batches),
        history.late_rewards,
        [],
        read_at,
    )


def _row(history: JournalHistory, batch: SeenBatch) -> BatchRecord:
    groups = [history.groups.get((batch.channel, number)) for number in (*batch.groups, *batch.replayed)]
    uids = dict.fromkeys([uid for group in groups if group is not None for uid in group.uids])
    members = [history.trajectories[batch.channel, uid] for uid in uids]
    steps = [step for one in members for step in one.steps.values()]
    for uid, index in batch.steps:
        one = history.trajectories.get((batch.channel, uid))
        if one is not None and index in one.steps:
            steps.append(one.steps[index])
            uids[uid] = None
    rewards = [one.reward for one in members if one.reward is not None]
    versions = [step.version for step in steps]
    return BatchRecord(
        number=batch.number,
        name=batch.lease or f"batch {batch.number}",
        channel=batch.channel,
        state=batch.state,
        at=batch.at,
        ended_at=batch.ended_at,
        deadline=batch.deadline,
        groups=len(groups),
        trajectories=len(uids),
        steps=len(steps),
        tokens=sum(step.response_tokens for step in steps),
        again=batch.again,
        reward=sum(rewards) / len(rewards) if rewards else None,
        versions=(min(versions), max(versions)) if versions else None,
    )
