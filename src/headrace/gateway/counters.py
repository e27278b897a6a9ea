"""What a gateway counts, and how Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from headrace.net.exposition import family, histogram

#: How the names of a gateway's metrics begin.
PREFIX = "headrace_gateway_"
#: Each counter: what it counts, and the names of its labels.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "calls": ("calls that were answered, by route and status", ("route", "status")),
    "prompts": ("prompts by why they are what they are; all but `extended` began a branch", ("channel", "cause")),
    "rendered": ("prompts that were rendered whole although they continue a call", ("channel",)),
    "steps": ("steps handed over, by channel", ("channel",)),
    "quarantined": ("steps that must not be trained on, by reason", ("channel", "reason")),
    "redacted": ("steps that --redact dropped, or failed at", ("channel", "why")),
    "failed": ("trajectories that were said to have failed, in time or not", ("status",)),
    "late": ("steps of trajectories that had ended", ("channel",)),
    "lost": ("steps that could not be kept", ("channel", "reason")),
    "unrecorded": ("calls that made no step, by why", ("reason",)),
    "refused": ("requests for which there was no room, by which bound", ("bound",)),
    "passed": ("calls that were passed on to a provider, by model", ("model",)),
    "tenant_requests": ("requests of tenants' keys, taken or refused by which bound", ("tenant", "outcome")),
    "tenant_tokens": ("tokens consumed and sampled for tenants", ("tenant", "kind")),
    "conversations": ("conversations of a live service: begun, ended as idle, or forgotten as empty", ("what",)),
    "feedback": ("what was said of answers later, in time or not", ("status",)),
    "rewards": ("answers that /compute_reward scored, or why not", ("outcome",)),
    "replayed": ("answers given again to a retry", ()),
    "malformed_calls": ("tool calls in answers that could not be read", ("channel",)),
    "tokens": ("tokens consumed and sampled", ("channel", "kind")),
}
#: Upper bounds of the latency histogram, in seconds.
BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)


class GatewayCounters:
    """What one gateway counts, by the names of `COUNTERS` and their labels, and a histogram of how long calls take."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[str, ...]], int] = {}
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, name: str, *labels: str, by: int = 1) -> None:
        """Counts one more of a name; as many labels as `COUNTERS` names for it."""
        key = (name, labels)
        self._counts[key] = self._counts.get(key, 0) + by

    def took(self, seconds: float) -> None:
        """Adds a call's duration to the histogram."""
        self._seconds += seconds
        self._buckets[next((at for at, most in enumerate(BUCKETS) if seconds <= most), len(BUCKETS))] += 1

    def total(self, name: str, *labels: str) -> int:
        """The sum of a counter over the labels that are not given."""
        return sum(n for (found, given), n in self._counts.items() if found == name and given[: len(labels)] == labels)

    def as_dict(self) -> dict[str, Any]:
        """Counts by name, nested by label."""
        out: dict[str, Any] = {name: {} if labels else 0 for name, (_, labels) in COUNTERS.items()}
        for (name, labels), count in self._counts.items():
            if not labels:
                out[name] = count
                continue
            at = out[name]
            for label in labels[:-1]:
                at = at.setdefault(label, {})
            at[labels[-1]] = count
        return out

    def rows(self) -> list[tuple[str, tuple[str, ...], int]]:
        """Every count with its name and labels."""
        return [(name, labels, count) for (name, labels), count in self._counts.items()]

    def families(self) -> Iterator[Metric]:
        """What is counted, as Prometheus' metrics."""
        found: dict[str, list[tuple[dict[str, str], int]]] = {name: [] for name in COUNTERS}
        for (name, labels), count in sorted(self._counts.items()):
            found[name].append((dict(zip(COUNTERS[name][1], labels, strict=True)), count))
        for name, (meaning, names) in COUNTERS.items():
            yield family(PREFIX + name, "counter", meaning, found[name] if names or found[name] else [({}, 0)])
        seconds = PREFIX + "call_seconds"
        yield histogram(seconds, "how long answered calls took", BUCKETS, self._buckets, self._seconds)
