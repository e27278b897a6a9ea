"""`headrace bench trainer`: how long the demo takes to learn, what the system costs, what packing is worth.

The demo is run as its user runs it, in a folder of its own, and its own files are read. `quick` runs the small game in
its place (1 to 3 in two guesses), which is learned in a tenth of the time: its ratios are the small game's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.report import Bar, Part, Report
from headrace.bench.trainer import packing
from headrace.bench.trainer.demo import measure_runs, played, rows_of, verdict_of
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.recipe import BAR

BARS = {
    "demo_seconds": Bar("the whole system, to a moving average of 0.95", at_most=300),
    "demo_vs_plain": Bar("the same, over a plain loop in one process without gateway or pool"),
    "packed_vs_padded": Bar("tokens/s packed over padded, lengths log-uniform 32 to 2,048", at_least=1.5),
    "sync_hold_p99_ms": Bar("how long a weight sync holds calls in the demo (mode keep)"),
    "trainer_idle": Bar("share of its time that the trainer waits while data is there", at_most=0.05),
}
MODES = ("keep", "drain", "abort-resume")
#: Steps that a mode is measured over, beside the demo's own.
MODE_STEPS = 40


def measure(quick: bool = False, *, runs: int | None = None, busy: int = 0) -> Report:
    """All of the trainer's figures; with `runs`, in their place, what so many runs of the demo came to, the last `busy`
    of them on cores that are busy with something else."""
    task = "number3" if quick else "number"
    if busy > (runs or 0):
        raise InvalidInput(f"--busy is {busy}: how many of --runs ({runs or 0}) are played on busy cores")
    if runs is not None:
        return measure_runs(runs, busy, task=task)
    report = Report("trainer", BARS, details={"task": task})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        report.add(_demo(task, Path(scratch)))
        report.add(_modes(task, Path(scratch)))
    found = packing.packed_vs_padded(packing.QUICK if quick else packing.FULL)
    ratio = found.pop("packed_vs_padded")
    report.add(Part({"packed_vs_padded": ratio}, found))
    return report


def _demo(task: str, scratch: Path) -> Part:
    run = scratch / "demo"
    verdict = played(run, task)
    if verdict["reward_end"] < BAR:
        raise HeadraceError(f"the demo did not learn {task}: {verdict}")
    plain = verdict_of("headrace.bench.trainer.plain", "--task", task)
    rows = rows_of(run)
    whole = sum(row["seconds"] for row in rows)
    idle = sum(row["times"]["idle"] for row in rows) / whole
    return Part(
        {
            "demo_seconds": verdict["seconds"],
            "demo_vs_plain": verdict["seconds"] / plain["seconds"],
            "sync_hold_p99_ms": _held(rows),
            "trainer_idle": idle,
        },
        {
            "demo_steps": verdict["steps"],
            "demo_calls": verdict["calls"],
            "demo_calls_s": verdict["calls"] / whole,
            "plain_seconds": plain["seconds"],
            "plain_steps": plain["steps"],
            "staleness_mean": verdict["staleness_mean"],
            "logprob_gap_max": verdict["logprob_gap_max"],
        },
    )


def _modes(task: str, scratch: Path) -> Part:
    """What becomes of calls in flight, way by way, in short runs of the demo."""
    found = {}
    for mode in MODES:
        run = scratch / mode
        played(run, task, steps=MODE_STEPS, sync_mode=mode)  # so few steps teach nobody
        found[f"sync_hold_p99_{mode.replace('-', '_')}_ms"] = _held(rows_of(run))
    return Part({}, found)


def _held(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.percentile([row["sync"]["hold_ms"] for row in rows if "sync" in row], 99))
