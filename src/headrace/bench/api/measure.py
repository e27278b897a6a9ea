"""Every part of `headrace bench api` in turn, and the bars that the figures are held against."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from headrace.bench.api import flat, flow, memory
from headrace.bench.api.servers import ABSENT, original_python
from headrace.bench.api.sizes import FULL, QUICK, Sizes
from headrace.bench.report import Bar, Part, Report

#: What cannot be said without the original.
RATIOS = {
    "flow_vs_atropos": Bar(
        "groups/s from 4 environments to a trainer over the original's: 8 sequences of 1,024 tokens, batches of 128",
        at_least=10,
    ),
    "flow_gzip_vs_atropos": Bar("the same with gzip both ways", at_least=10),
    "cpu_per_group_vs_atropos": Bar("CPU of a group, journal on, over the original's", at_most=0.1),
    "cpu_per_group_gzip_vs_atropos": Bar("the same with gzip both ways", at_most=0.1),
}
BARS = {
    "batch_flat": Bar("/batch at 20,000 queued groups over 1,000", at_most=1.5),
    "status_env_flat": Bar("/status-env at 20,000 queued groups over 1,000", at_most=1.5),
    "memory_vs_body": Bar("growth of memory over the bytes of the queued groups' gzip bodies", at_most=1.5),
    "minalloc_flat": Bar("/batch with a share for every environment at 8,000 queued groups over 1,000", at_most=1.5),
}


def measure(quick: bool = False) -> Report:
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: Sizes, base: Path | None = None) -> Report:
    """Every part in turn, in folders of its own below `base`, each gone before the next begins."""
    console = Console(stderr=True)
    bars = RATIOS | BARS
    details: dict[str, object] = {"sizes": sizes.as_dict(), "original": "atroposlib"}
    if original_python() is None:
        console.print(ABSENT)
        bars = BARS
        details["original"] = "not installed"
    report = Report(f"headrace bench api ({sizes.name})", bars, details=details)
    for part in (flow, flat, memory):
        console.print(f"{part.__name__.rpartition('.')[2]} ...", end=" ", style="dim")
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=base) as folder:
            found: Part = part.measure(sizes, Path(folder))
        console.print(", ".join(f"{key} {value:.3g}" for key, value in found.ratios.items()), highlight=False)
        report.add(found)
    return report
