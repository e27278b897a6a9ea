"""Metrics as Prometheus scrapes them: families of samples to text, and the texts of several processes to one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True)
class _Families(Collector):
    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


def family(
    name: str, kind: Literal["counter", "gauge"], meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> Metric:
    """A metric and its samples, each with its labels. A counter's name is without `_total`, which is written."""
    found = Metric(name, meaning, kind)
    for labels, value in samples:
        found.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), value)
    return found


def loop_tasks(prefix: str) -> Metric:
    """How many tasks the running event loop has, as the gauge `tasks` behind a prefix."""
    return family(f"{prefix}tasks", "gauge", "tasks of the event loop", [({}, len(asyncio.all_tasks()))])


def histogram(name: str, meaning: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """A histogram without labels: `counts` has one entry a bound, of what lies under it and over the one before, and
    one for what lies over the last; `total` is the sum of all that was observed."""
    below, buckets = 0, []
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=total)


def exposition(families: Iterable[Metric]) -> bytes:
    """The text of a scrape; its kind is `CONTENT_TYPE`."""
    return generate_latest(_Families(families))


def joined_by_worker(texts: Iterable[str]) -> bytes:
    """The texts of several worker processes as one, each sample with its worker's number as the label `worker`."""
    families: dict[tuple[str, str], Metric] = {}
    for number, text in enumerate(texts):
        for found in text_string_to_metric_families(text):
            # A counter and a gauge may differ by `_total` alone, which a family's name does not have.
            key = found.name, found.type
            joined = families.setdefault(key, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                joined.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
    return exposition(families.values())
