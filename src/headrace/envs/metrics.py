"""What an environment counts, the metrics made of it, and where they are written.

Counts run from the start. Of a row of metrics, durations, lengths, scores, rates and pauses cover the time since the
row before; groups and failures are totals. Rows go to JSON lines, and to TensorBoard and wandb where configured; a full
disk or a failing library costs a row and a warning, never the work.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.metrics import (
    JsonLines,
    Row,
    Table,
    TensorBoard,
    Wandb,
    Writer,
)

log = logging.getLogger("headrace.envs")

#: Tracebacks that are kept to be looked at.
MAX_TRACEBACKS = 16
#: Seconds between two log lines about the same event: often enough to see that it goes on, without flooding the log.
REPEAT_LOG_S = 30.0
#: Why a group is not sent, in words, by the name that it is counted under.
REASONS = {
    "equal_scores": "all its scores are equal",
    "too_long": "a sequence is longer than the trainer takes",
    "rubbish": "it is no group",
    "no_group": "nothing came of its item (None)",
}


class GaveUp(HeadraceError):
    """`max_consecutive_failures` items in a row failed, so that the next ones would too."""

    code = "gave_up"


class RepeatedEvents:
    """Counts events that repeat, so that each is logged the first time and then, as a number, every `REPEAT_LOG_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: Counter[Hashable] = Counter()
        self._told: dict[Hashable, float] = {}

    def note(self, what: Hashable) -> int | None:
        """Counts an event. Its count where it is to be logged now, else None."""
        self._times[what] += 1
        now = self._clock()
        if what in self._told and now - self._told[what] < REPEAT_LOG_S:
            return None
        self._told[what] = now
        return self._times[what]


@dataclass(slots=True)
class Counts:
    """Counts of one environment since it began."""

    items: int = 0
    groups: int = 0
    #: Over all groups that were fit to be sent.
    sequences: int = 0
    scores: float = 0.0
    #: Failures, by what failed: rollout, timeout, rubbish (an invalid result), evaluate, save_checkpoint, ...
    failed: Counter[str] = field(default_factory=Counter)
    #: Groups that were not sent, by reason.
    skipped: Counter[str] = field(default_factory=Counter)
    #: Failed items since the last group, and why the last of them failed.
    failures_in_a_row: int = 0
    last_failure: str = ""
    pauses: int = 0
    paused_s: float = 0.0
    evaluations: int = 0
    tracebacks: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_TRACEBACKS))
    repeats: RepeatedEvents = field(default_factory=RepeatedEvents)

    def fail(self, what: str, error: BaseException) -> None:
        """Counts a failure. A new one is logged with its traceback, a repeated one as a number."""
        self.failed[what] += 1
        self.tracebacks.append("".join(traceback.format_exception(error)))
        said = str(error) or type(error).__name__
        times = self.repeats.note((what, type(error), *_raised_at(error)))
        if times == 1:
            log.error("%s failed: %s", what, said, exc_info=error)
        elif times is not None:
            log.error("%s failed in the same place for the %dth time: %s", what, times, said)

    def skip(self, reason: str) -> None:
        """Counts a group that is not sent. The first of each reason is logged, and then their number."""
        self.skipped[reason] += 1
        times = self.repeats.note(reason)
        if times == 1:
            log.info("a group is not sent: %s; more of them are counted", REASONS.get(reason, reason))
        elif times is not None:
            log.info("%d groups were not sent so far: %s", times, REASONS.get(reason, reason))

    def item_failed(self, why: str) -> None:
        """Counts a failed item: one more in a row."""
        self.failures_in_a_row += 1
        self.last_failure = why

    def item_succeeded(self) -> None:
        """A group was made: failures in a row are counted anew."""
        self.failures_in_a_row = 0

    def give_up_after(self, most: int | None) -> None:
        """Raises `GaveUp` where so many items in a row failed; None allows any number."""
        if most is not None and self.failures_in_a_row >= most:
            raise GaveUp(
                f"{self.failures_in_a_row} items in a row came to nothing (max_consecutive_failures is {most}), "
                f"the last one with: {self.last_failure}"
            )

    def log_skipped(self) -> None:
        """Logs how many groups were not sent, by reason."""
        if sum(self.skipped.values()) > 1:
            said = ", ".join(f"{times} because {REASONS.get(reason, reason)}" for reason, times in self.skipped.items())
            log.info("groups that were not sent, in all: %s", said)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Counts what the code inside raises, and goes on: for an author's code and for reports."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)


def _raised_at(error: BaseException) -> tuple[str, int]:
    """File and line that raised an error: by these it is recognised, as messages name different items."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[0].filename, frames[0].lineno or 0) if frames else ("", 0)


#: Metrics of an environment's lists of durations and workers, by attribute.
LIST_METRICS = {
    "task_duration": "train_perf/task_duration",
    "succeeded_task_duration": "train_perf/succeeded_task_duration",
    "failed_task_duration": "train_perf/failed_task_duration",
    "workers_added_list": "train_perf/workers_added_per_attempt",
}
#: Metrics of their lengths.
LIST_LENGTH_METRICS = {
    "succeeded_task_duration": "train/items_sent_to_api",
    "failed_task_duration": "train/items_rejected",
}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, maximum and minimum of some values."""
    mean = math.fsum(values) / len(values)
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        f"{name}_max": max(values),
        f"{name}_min": min(values),
    }


def drain_lists(env: object) -> dict[str, float]:
    """The metrics of the environment's lists, which are emptied."""
    found: dict[str, float] = {}
    for attribute, name in LIST_METRICS.items():
        values = getattr(env, attribute)
        if not values:
            continue
        found |= spread(name, values)
        if attribute in LIST_LENGTH_METRICS:
            found[LIST_LENGTH_METRICS[attribute]] = len(values)
        setattr(env, attribute, [])
    return found


def length_metrics(values: Sequence[int], limit: int) -> dict[str, float]:
    """Lengths of completions; `_p95` is the share that exceeds 95 % of the limit, where there is one (limit > 0)."""
    if not values:
        return {}
    found = spread("train/completion_lengths", values)
    found["train/completion_lengths"] = found.pop("train/completion_lengths_mean")
    if limit > 0:
        found["train/completion_lengths_p95"] = sum(value > 0.95 * limit for value in values) / len(values)
    return found


class Performance:
    """Rates and means of an environment's counts between two rows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._before = (0, 0, 0.0, 0.0)

    def row(self, counts: Counts, workers: int, queue_size: int | None) -> dict[str, float]:
        """The metrics since the last call. `workers` run now; the API's queue has `queue_size` groups, where known."""
        now = self._clock()
        groups, sequences, scores, paused = self._before
        passed = max(now - self._at, 1e-9)
        self._at = now
        self._before = (counts.groups, counts.sequences, counts.scores, counts.paused_s)
        found = {
            "train_perf/groups_per_s": (counts.groups - groups) / passed,
            "train_perf/sequences_per_s": (counts.sequences - sequences) / passed,
            "train_perf/paused_share": (counts.paused_s - paused) / passed,
            "train_perf/workers": workers,
            "train_perf/failures": sum(counts.failed.values()),
            "train/groups_skipped": sum(counts.skipped.values()),
            "train/groups": counts.groups,
        }
        if counts.sequences > sequences:
            found["train/score_mean"] = (counts.scores - scores) / (counts.sequences - sequences)
        if queue_size is not None:
            found["train_perf/queue_size"] = queue_size
        return found


COLUMNS = ("text", "score")


def rollout_table(groups: Iterable[Sequence[tuple[Any, ...]]]) -> Table:
    """The table of rollouts' texts and scores; further values that an override kept are left out."""
    shown = Table(COLUMNS)
    for group in groups:
        for rollout in group:
            shown.add_data(*rollout[: len(COLUMNS)])
    return shown


class MetricsLog:
    """The metrics writers of one run. The JSON lines file is made with the first row, TensorBoard's at once, or an
    error where it is not installed; wandb is opened once the trainer has named the project. `last` is the last row's
    own metrics.
    """

    def __init__(self, lines: str | None, tensorboard: str | None = None) -> None:
        self._lines = Path(lines) if lines is not None else None
        self.last: Mapping[str, Any] = {}
        self._writers: list[Writer] = []
        if tensorboard is not None:
            self._writers.append(TensorBoard(Path(tensorboard)))
        self._wandb: Writer | None = None
        self._begun = False
        self._warned: set[str] = set()

    def open_wandb(self, project: str | None, *, group: str | None, name: str | None, config: Row) -> None:
        """Writes to wandb too. A failure is a warning: wandb is on by default, and the lines hold the same."""
        folder = self._lines.parent if self._lines is not None else Path()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._wandb = Wandb(project, folder, name=name, group=group, config=config)
        except (HeadraceError, OSError) as error:
            log.warning("%s; metrics go to %s (use_wandb: false does without)", error, self._lines or "no file either")

    def write(self, step: int, own: Mapping[str, Any], shared: Mapping[str, Any], prefix: str | None) -> None:
        """Writes one row. `prefix` names this environment; in wandb, it is put before the names of its own metrics."""
        self.last = own
        self._write(step, own, shared, prefix)

    def _write(self, step: int, own: Mapping[str, Any], shared: Mapping[str, Any], prefix: str | None) -> None:
        row = {"step": step, "time": time.time(), "env": prefix, **own, **shared}
        self._begin()
        for writer in self._writers:
            self._try(writer, row)
        if self._wandb is not None:
            named = {f"{prefix}_{name}": value for name, value in own.items()} if prefix else dict(own)
            self._try(self._wandb, {"step": step, **named, **shared})

    def event(self, step: int, name: str, times: int, about: Mapping[str, float], prefix: str | None) -> None:
        """Writes a row for an event: `event/NAME` is how often it has happened, `event/NAME/…` what is known of it."""
        told = {f"event/{name}": times, **{f"event/{name}/{what}": value for what, value in about.items()}}
        self._write(step, told, {}, prefix)

    def close(self) -> None:
        """Closes every writer; one that fails is logged, and keeps none of the others open."""
        for writer in (*self._writers, *((self._wandb,) if self._wandb is not None else ())):
            try:
                writer.close()
            except Exception as error:
                log.warning("%s was not closed: %s", type(writer).__name__, error)
        self._writers, self._wandb, self._begun = [], None, False

    def _begin(self) -> None:
        if self._begun or self._lines is None:
            return
        self._begun = True
        try:
            self._lines.parent.mkdir(parents=True, exist_ok=True)
            self._writers.append(JsonLines(self._lines))
        except OSError as error:
            log.warning("metrics are not kept: %s", error)

    def _try(self, writer: Writer, row: Row) -> None:
        try:
            writer.write(row)
        except Exception as error:
            said = f"{type(writer).__name__}: {error}"
            if said not in self._warned:
                self._warned.add(said)
                log.warning("a row of metrics was not written by %s", said)
