"""Every part of `headrace bench pool` in turn, and the bars that the figures are held against."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich.console import Console

from headrace.bench.pool import durable, flat, http, memory, recover
from headrace.bench.pool.sizes import FULL, QUICK, Sizes
from headrace.bench.report import Bar, Part, Report

BARS = {
    "durable_vs_raw": Bar(
        "fsync'd submits of eight writers over raw write + fdatasync of the same bytes", at_least=0.3
    ),
    "fetch_flat": Bar("time of a fetch of 32 groups, 100,000 groups queued over 10,000", at_most=1.5),
    "submit_flat": Bar("time of a submit, 100,000 groups queued over 10,000", at_most=1.5),
    "memory_vs_unique": Bar("growth of a `pool serve` process over the bytes of unique ids and log-probs", at_most=1.5),
    "journal_vs_unique": Bar("bytes of its journal over the same", at_most=1.2),
    "ray_vs_naive": Bar("steps/s through Ray over one awaited call a step, with lists, into a bare actor", at_least=8),
    "http_vs_json": Bar("steps/s fetched over HTTP, arrays out, over the same as JSON by orjson", at_least=5),
    "recover_vs_read": Bar("time of a recovery of 100,000 steps over reading the same bytes", at_most=20),
}


def measure(quick: bool = False) -> Report:
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: Sizes, base: Path | None = None) -> Report:
    """Every part in turn, in folders of its own below `base`, each gone before the next begins."""
    from headrace.bench.pool import ray  # needs the extra: said before anything is measured

    report = Report(f"headrace bench pool ({sizes.name})", BARS, details={"sizes": sizes.as_dict()})
    console = Console(stderr=True)
    for part in (durable, flat, recover, memory, http, ray):
        console.print(f"{part.__name__.rpartition('.')[2]} ...", end=" ", style="dim")
        with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=base or scratch()) as folder:
            found: Part = part.measure(sizes, Path(folder))
        console.print(", ".join(f"{key} {value:.3g}" for key, value in found.ratios.items()), highlight=False)
        report.add(found)
    return report


def scratch() -> Path | None:
    """Where the journals go: TMPDIR where it is set, else a folder that lies on a disk and not in memory."""
    disk = Path("/var/tmp")
    return None if os.environ.get("TMPDIR") or not os.access(disk, os.W_OK) else disk
