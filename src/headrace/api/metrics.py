"""The numbers of scored groups as Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from prometheus_client.metrics_core import Metric

from headrace.net.exposition import family

#: How the names of these metrics begin.
PREFIX = "headrace_api_"
#: What became of groups, as `stats()["desk"]` counts them.
ENDS = ("posted", "served", "moved", "cleared", "duplicates")
#: Where those that are here are.
PLACES = ("queued", "buffered", "out")
DEAD_LETTERS = "groups that no batch can hold, or that were damaged"


def families(scored: Mapping[str, Any]) -> Iterator[Metric]:
    """Prometheus' metrics out of the pool's `stats()["desk"]`."""
    yield _metric("groups", "counter", "groups by what became of them", "end", {end: scored[end] for end in ENDS})
    yield _metric("dead_letters", "counter", DEAD_LETTERS, "why", dict(sorted(scored["dead_letters"].items())))
    yield _metric("groups", "gauge", "groups that are here, by where", "place", {at: scored[at] for at in PLACES})
    yield _metric("step", "gauge", "batches handed out, from the step that the trainer began with", "", scored["step"])
    yield _metric("environments", "gauge", "environments that registered", "", scored["environments"])
    yield _metric("memory_bytes", "gauge", "bytes of groups in memory", "", scored["memory_bytes"])
    yield _metric("spilled_bytes", "gauge", "bytes of groups on the disk", "", scored["spilled_bytes"])


def _metric(
    name: str, kind: Literal["counter", "gauge"], meaning: str, label: str, found: int | Mapping[str, int]
) -> Metric:
    samples = [({label: by}, n) for by, n in found.items()] if isinstance(found, Mapping) else [({}, found)]
    return family(PREFIX + name, kind, meaning, samples)
