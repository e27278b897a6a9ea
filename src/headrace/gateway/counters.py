"""What a gateway counts, and how Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Each counter: what it counts, and the names of its labels.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "calls": ("calls that were answered, by route and status", ("route", "status")),
    "prompts": ("prompts by why they are what they are; all but `extended` began a branch", ("channel", "cause")),
    "rendered": ("prompts that were rendered whole although they continue a call", ("channel",)),
    "steps": ("steps handed over, by channel", ("channel",)),
    "quarantined": ("steps that must not be trained on, by reason", ("channel", "reason")),
    "redacted": ("steps that --redact dropped, or failed at", ("channel", "why")),
    "late": ("steps of trajectories that had ended", ("channel",)),
    "lost": ("steps that could not be kept", ("channel", "reason")),
    "unrecorded": ("calls that made no step, by why", ("reason",)),
    "passed": ("calls that were passed on to a provider, by model", ("model",)),
    "tenant_requests": ("requests of tenants' keys, taken or refused by which bound", ("tenant", "outcome")),
    "tenant_tokens": ("tokens consumed and sampled for tenants", ("tenant", "kind")),
    "conversations": ("conversations of a live service: begun, ended as idle, or forgotten as empty", ("what",)),
    "feedback": ("what was said of answers later, in time or not", ("status",)),
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

    def prometheus(self, gauges: Mapping[str, tuple[str, Iterable[tuple[dict[str, str], float]]]]) -> str:
        """The text that a Prometheus server scrapes; `gauges` by name: what they say, and their samples."""
        lines: list[str] = []
        for name, (meaning, names) in COUNTERS.items():
            full = f"headrace_gateway_{name}_total"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} counter"]
            found = [(labels, n) for (held, labels), n in sorted(self._counts.items()) if held == name]
            lines += [f"{full}{_labels(dict(zip(names, labels, strict=True)))} {n}" for labels, n in found]
            if not names and not found:
                lines.append(f"{full} 0")
        for name, (meaning, samples) in gauges.items():
            full = f"headrace_gateway_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} gauge"]
            lines += [f"{full}{_labels(labels)} {value:g}" for labels, value in samples]
        return "\n".join([*lines, *self._histogram()]) + "\n"

    def _histogram(self) -> list[str]:
        name = "headrace_gateway_call_seconds"
        lines = [f"# HELP {name} how long answered calls took", f"# TYPE {name} histogram"]
        below = 0
        for most, count in zip((*map(str, BUCKETS), "+Inf"), self._buckets, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{most}"}} {below}')
        return [*lines, f"{name}_sum {self._seconds:g}", f"{name}_count {below}"]


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
