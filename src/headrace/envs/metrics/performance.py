"""How an environment does. Durations, lengths, scores, rates and pauses are of the time since the last row; groups and
failures are counted from the beginning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.envs.reporting import Reporting

#: An environment's lists, by the names that their figures have.
LISTS = {
    "task_duration": "train_perf/task_duration",
    "succeeded_task_duration": "train_perf/succeeded_task_duration",
    "failed_task_duration": "train_perf/failed_task_duration",
    "workers_added_list": "train_perf/workers_added_per_attempt",
}
COUNTED = {"succeeded_task_duration": "train/items_sent_to_api", "failed_task_duration": "train/items_rejected"}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, deviation, most and least of some values."""
    mean = math.fsum(values) / len(values)
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        f"{name}_max": max(values),
        f"{name}_min": min(values),
    }


def drained(env: Reporting) -> dict[str, float]:
    """The figures of the environment's lists, which are emptied."""
    found: dict[str, float] = {}
    for attribute, name in LISTS.items():
        values = getattr(env, attribute)
        if not values:
            continue
        found |= spread(name, values)
        if attribute in COUNTED:
            found[COUNTED[attribute]] = len(values)
        setattr(env, attribute, [])
    return found


def lengths(values: Sequence[int], limit: int) -> dict[str, float]:
    """How long completions are; `_p95` is the share of them that all but reach the limit, where there is one."""
    if not values:
        return {}
    found = spread("train/completion_lengths", values)
    found["train/completion_lengths"] = found.pop("train/completion_lengths_mean")
    if limit > 0:
        found["train/completion_lengths_p95"] = sum(value > 0.95 * limit for value in values) / len(values)
    return found


class Performance:
    """What the counters of an environment come to between two rows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._before = (0, 0, 0.0, 0.0)

    def row(self, env: Reporting) -> dict[str, float]:
        counts, now = env.counts, self._clock()
        groups, sequences, scores, paused = self._before
        passed = max(now - self._at, 1e-9)
        self._at = now
        self._before = (counts.groups, counts.sequences, counts.scores, counts.paused_s)
        found = {
            "train_perf/groups_per_s": (counts.groups - groups) / passed,
            "train_perf/sequences_per_s": (counts.sequences - sequences) / passed,
            "train_perf/paused_share": (counts.paused_s - paused) / passed,
            "train_perf/workers": len(env.workers),
            "train_perf/failures": sum(counts.failed.values()),
            "train/groups_skipped": sum(counts.skipped.values()),
            "train/groups": counts.groups,
        }
        if counts.sequences > sequences:
            found["train/score_mean"] = (counts.scores - scores) / (counts.sequences - sequences)
        if "queue_size" in env.status_dict:
            found["train_perf/queue_size"] = env.status_dict["queue_size"]
        return found
