"""The numbers of scored groups as Prometheus scrapes them, and the writer of its text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: What became of groups, as `stats()["desk"]` counts them.
ENDS = ("posted", "served", "moved", "cleared", "duplicates")
#: Where those that are here are.
PLACES = ("queued", "buffered", "out")
DEAD_LETTERS = "groups that no batch can hold, or that were damaged"
CONTENT_TYPE = b"text/plain; version=0.0.4"


def prometheus(scored: Mapping[str, Any]) -> str:
    """The text that a Prometheus server scrapes, from the pool's `stats()["desk"]`."""
    ends = {end: scored[end] for end in ENDS}
    dead = dict(sorted(scored["dead_letters"].items()))
    places = {place: scored[place] for place in PLACES}
    return "".join(
        (
            _metric("groups_total", "counter", "groups by what became of them", ends, "end"),
            _metric(
                "dead_letters_total", "counter", "groups that no batch can hold, or that were damaged", dead, "why"
            ),
            _metric("groups", "gauge", "groups that are here, by where", places, "place"),
            _metric("step", "gauge", "batches handed out, from the step that the trainer began with", scored["step"]),
            _metric("environments", "gauge", "environments that registered", scored["environments"]),
            _metric("memory_bytes", "gauge", "bytes of groups in memory", scored["memory_bytes"]),
            _metric("spilled_bytes", "gauge", "bytes of groups on the disk", scored["spilled_bytes"]),
        )
    )


def _metric(name: str, kind: str, meaning: str, found: int | Mapping[str, int], label: str = "") -> str:
    samples = [({label: by}, n) for by, n in found.items()] if isinstance(found, Mapping) else [({}, found)]
    return exposition(f"headrace_api_{name}", kind, meaning, samples)


def exposition(name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], object]]) -> str:
    """One metric in Prometheus' text format; a sample is its labels and its value."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
