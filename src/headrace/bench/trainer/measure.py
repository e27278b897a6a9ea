"""`headrace bench trainer`: how long the demo takes to learn, what the system costs, what packing gains.

The demo is run as its user runs it, in a folder of its own, and its files are read. `quick` runs the small game instead
(1 to 3 in two guesses), which is learned in a tenth of the time: its ratios are those of the small game.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.report import Bar, BenchReport, Figures
from headrace.bench.trainer import packing, sharing
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.recipe import LEARNED_REWARD

BARS = {
    "demo_seconds": Bar("the whole system, to a moving average of 0.95", at_most=300),
    "demo_vs_plain": Bar("the same, over a plain loop in one process without gateway or pool"),
    "packed_vs_padded": Bar("tokens/s packed over padded, lengths log-uniform 32 to 2,048", at_least=1.5),
    "ranks2_gap": Bar("largest relative difference of a weight after ten steps, two ranks and one", at_most=1e-5),
    "tree_vs_packed": Bar(
        "tokens/s of 8 sequences of 2,048 shared tokens and 1,024 own, shared ones once, over packed"
    ),
    "tree_vs_packed_long": Bar("the same with 12,288 shared tokens and 2,048 own"),
    "tree_vs_packed_demo": Bar("the same of a step of the demo, whose prompts are shared too", at_least=1.3),
    "sync_hold_p99_ms": Bar("how long a weight sync holds calls in the demo (mode keep)"),
    "trainer_idle": Bar("share of its time that the trainer waits while data is there", at_most=0.05),
}
MODES = ("keep", "drain", "abort-resume")
#: Steps that a mode is measured over, beside the demo's own.
MODE_STEPS = 40


def measure(quick: bool = False, *, runs: int | None = None, busy: int = 0) -> BenchReport:
    """All figures of the trainer; with `runs`, the results of so many runs of the demo instead, the last `busy` of them
    on busy cores."""
    task = "number3" if quick else "number"
    if busy > (runs or 0):
        raise InvalidInput(f"--busy is {busy}: how many of --runs ({runs or 0}) are played on busy cores")
    if runs is not None:
        return measure_runs(runs, busy, task=task)
    report = BenchReport("trainer", BARS, details={"task": task})
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        report.add(_demo(task, Path(scratch)))
        report.add(_modes(task, Path(scratch)))
    found = packing.packed_vs_padded(packing.QUICK if quick else packing.FULL)
    ratio = found.pop("packed_vs_padded")
    report.add(Figures({"packed_vs_padded": ratio}, found))
    report.add(Figures(verdict_of("headrace.bench.trainer.ranks"), {}))
    found = sharing.tree_vs_packed(sharing.QUICK if quick else sharing.FULL)
    ratios = {name: found.pop(name) for name in (*sharing.SHAPES, sharing.DEMO)}
    report.add(Figures(ratios, found))
    return report


def _demo(task: str, scratch: Path) -> Figures:
    run = scratch / "demo"
    verdict = played(run, task)
    if verdict["reward_end"] < LEARNED_REWARD:
        raise HeadraceError(f"the demo did not learn {task}: {verdict}")
    plain = verdict_of("headrace.bench.trainer.plain", "--task", task)
    rows = rows_of(run)
    whole = sum(row["seconds"] for row in rows)
    idle = sum(row["times"]["idle"] for row in rows) / whole
    return Figures(
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


def _modes(task: str, scratch: Path) -> Figures:
    """Short runs of the demo in each sync mode: what becomes of calls in flight."""
    found = {}
    for mode in MODES:
        run = scratch / mode
        played(run, task, steps=MODE_STEPS, sync_mode=mode)  # too few steps to learn anything
        found[f"sync_hold_p99_{mode.replace('-', '_')}_ms"] = _held(rows_of(run))
    return Figures({}, found)


def _held(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.percentile([row["sync"]["hold_ms"] for row in rows if "sync" in row], 99))


RUNS_BARS = {
    "learned_share": Bar(
        f"runs whose last ten steps have a mean reward of {LEARNED_REWARD} or more, of all runs", at_least=1
    ),
    "quiet_seconds_max": Bar("the slowest run beside which nothing else ran, starts included", at_most=120),
}
#: The place of what a virtual machine wanted and did not get, in the first line of /proc/stat.
STEAL_FIELD = 7


def measure_runs(runs: int, busy: int = 0, *, task: str = "number") -> BenchReport:
    """Plays the demo with the seeds 0 to `runs` - 1, one after the other, the last `busy` of them beside one process a
    core that only computes. Each run is told on stderr as it ends.

    The report's details hold one row a run, in order: seed, whether it ran beside a load, the share of the CPU that
    other machines on the same host took meanwhile (None where the system does not tell), and the demo's own verdict.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for seed in range(runs):
            loaded = seed >= runs - busy
            before = _ticks()
            with _load(_cores() if loaded else 0):
                verdict = played(Path(scratch) / f"demo-{seed}", task, seed=seed)
            found.append({"seed": seed, "busy": loaded, "stolen": _stolen(before, _ticks()), **verdict})
            print(
                f"seed {seed}{', cores busy' if loaded else ''}: reward {verdict['reward_end']:.3f} after "
                f"{verdict['steps']} steps, {verdict['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return _report(task, found)


def _report(task: str, found: Sequence[dict[str, Any]]) -> BenchReport:
    quiet = [row["seconds"] for row in found if not row["busy"]]
    bars = RUNS_BARS if quiet else {name: bar for name, bar in RUNS_BARS.items() if name != "quiet_seconds_max"}
    ratios = {"learned_share": sum(row["reward_end"] >= LEARNED_REWARD for row in found) / len(found)}
    if quiet:
        ratios["quiet_seconds_max"] = max(quiet)
    figures: dict[str, float] = {"runs": len(found), "busy_runs": len(found) - len(quiet)}
    for name in ("steps", "calls", "seconds", "stolen"):
        if values := [row[name] for row in found if row[name] is not None]:
            figures |= {f"{name}_p50": float(np.median(values)), f"{name}_max": float(max(values))}
    report = BenchReport("trainer, the demo run after run", bars, details={"task": task, "demo_runs": list(found)})
    report.add(Figures(ratios, figures))
    return report


def played(run: Path, task: str, *, seed: int = 0, steps: int | None = None, sync_mode: str = "auto") -> dict[str, Any]:
    """The result of one run of the demo in the folder `run`, whether it learned or not."""
    given = ["headrace", "demo", "--task", task, "--run", run, "--seed", seed, "--sync-mode", sync_mode]
    return verdict_of(*given, *(["--steps", steps] if steps is not None else []), may_fail=True)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The trainer's metrics of a run, one object for each step."""
    return [json.loads(line) for line in (run / "trainer" / "metrics.jsonl").read_text().splitlines()]


def verdict_of(*args: object, may_fail: bool = False) -> dict[str, Any]:
    """The last line that `python -m ARGS` prints, a JSON object. Raises where the command fails, or, with `may_fail`,
    where it fails without such a line."""
    done = subprocess.run([sys.executable, "-m", *map(str, args)], capture_output=True, text=True)
    if done.returncode and not (may_fail and done.stdout.rstrip().endswith("}")):
        raise HeadraceError(f"{' '.join(map(str, args))} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def _load(processes: int) -> Iterator[None]:
    """Keeps so many cores busy until the block ends."""
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def _ticks() -> list[int] | None:
    """CPU times since the system's start, in Linux' order: user, nice, system, idle, ..."""
    try:
        return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None


def _stolen(before: list[int] | None, after: list[int] | None) -> float | None:
    if before is None or after is None:
        return None
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return round(spent[STEAL_FIELD] / max(1, sum(spent)), 3)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
