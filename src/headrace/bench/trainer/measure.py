"""`headrace bench trainer`: how long the demo takes to learn, what the system costs, what packing is worth.

The demo is run as its user runs it, in a folder of its own, and its own files are read. `quick` runs the small game in
its place (1 to 3 in two guesses), which is learned in a tenth of the time: its ratios are the small game's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.report import Bar, Part, Report
from headrace.bench.trainer import packing
from headrace.data.errors import HeadraceError
from headrace.demo.recipe import BAR

BARS = {
    "demo_seconds": Bar("the whole system, to a moving average of 0.95", at_most=300),
    "demo_vs_plain": Bar("the same, over a plain loop in one process without gateway or pool"),
    "packed_vs_padded": Bar("tokens/s packed over padded, lengths log-uniform 32 to 2,048", at_least=1.5),
    "sync_hold_p99_ms": Bar("how long a weight sync holds calls in the demo (mode keep)"),
    "trainer_idle": Bar("share of its time that the trainer waits while data is there", at_most=0.05),
}
MODES = ("keep", "drain", "abort-resume")
#: How many runs of the demo are tried.
SEEDS = 3
#: Steps that a mode is measured over, beside the demo's own.
MODE_STEPS = 40


def measure(quick: bool = False) -> Report:
    task = "number3" if quick else "number"
    report = Report("trainer", BARS, details={"task": task})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        report.add(_demo(task, Path(scratch)))
        report.add(_modes(task, Path(scratch)))
    found = packing.packed_vs_padded(packing.QUICK if quick else packing.FULL)
    ratio = found.pop("packed_vs_padded")
    report.add(Part({"packed_vs_padded": ratio}, found))
    return report


def _demo(task: str, scratch: Path) -> Part:
    run, verdict = _learned(task, scratch)
    plain = _run("headrace.bench.trainer.plain", "--task", task)
    rows = _rows(run)
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
            "demo_seed": verdict["seed"],
            "demo_steps": verdict["steps"],
            "demo_calls": verdict["calls"],
            "demo_calls_s": verdict["calls"] / whole,
            "plain_seconds": plain["seconds"],
            "plain_steps": plain["steps"],
            "staleness_mean": verdict["staleness_mean"],
            "logprob_gap_max": verdict["logprob_gap_max"],
        },
    )


def _learned(task: str, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """The folder and the verdict of the first run that gets there: which games an asynchronous run learns from, and so
    now and then whether it does, is a matter of timing."""
    for seed in range(SEEDS):
        run = scratch / f"demo-{seed}"
        verdict = _run("headrace", "demo", "--task", task, "--run", run, "--seed", seed, may_fail=True)
        if verdict["reward_end"] >= BAR:
            return run, {**verdict, "seed": seed}
    raise HeadraceError(f"the demo learned {task} with none of the seeds 0 to {SEEDS - 1}")


def _modes(task: str, scratch: Path) -> Part:
    """What becomes of calls in flight, way by way, in short runs of the demo."""
    found = {}
    for mode in MODES:
        run = scratch / mode
        _run(
            *("headrace", "demo", "--task", task, "--run", run, "--steps", MODE_STEPS, "--sync-mode", mode),
            may_fail=True,  # so few steps teach nobody
        )
        found[f"sync_hold_p99_{mode.replace('-', '_')}_ms"] = _held(_rows(run))
    return Part({}, found)


def _held(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.percentile([row["sync"]["hold_ms"] for row in rows if "sync" in row], 99))


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "trainer" / "metrics.jsonl").read_text().splitlines()]


def _run(*args: object, may_fail: bool = False) -> dict[str, Any]:
    """The last line of what a command prints."""
    done = subprocess.run([sys.executable, "-m", *map(str, args)], capture_output=True, text=True)
    if done.returncode and not (may_fail and done.stdout):
        raise HeadraceError(f"{' '.join(map(str, args))} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
