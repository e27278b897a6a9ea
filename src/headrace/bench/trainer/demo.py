"""The demo as its user runs it: `headrace demo`, in a folder of its own, whose files tell what it did."""

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

from headrace.bench.report import Bar, Part, Report
from headrace.data.errors import HeadraceError
from headrace.demo.recipe import BAR

__all__ = ["measure_runs", "played", "rows_of", "verdict_of"]

RUNS_BARS = {
    "learned_share": Bar(f"runs whose last ten steps have a mean reward of {BAR} or more, of all runs", at_least=1),
    "quiet_seconds_max": Bar("the slowest run beside which nothing else ran, starts included", at_most=120),
}
#: The place of what a virtual machine wanted and did not get, in the first line of /proc/stat.
STEAL = 7


def measure_runs(runs: int, busy: int = 0, *, task: str = "number") -> Report:
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


def _report(task: str, found: Sequence[dict[str, Any]]) -> Report:
    quiet = [row["seconds"] for row in found if not row["busy"]]
    bars = RUNS_BARS if quiet else {name: bar for name, bar in RUNS_BARS.items() if name != "quiet_seconds_max"}
    ratios = {"learned_share": sum(row["reward_end"] >= BAR for row in found) / len(found)}
    if quiet:
        ratios["quiet_seconds_max"] = max(quiet)
    figures: dict[str, float] = {"runs": len(found), "busy_runs": len(found) - len(quiet)}
    for name in ("steps", "calls", "seconds", "stolen"):
        if values := [row[name] for row in found if row[name] is not None]:
            figures |= {f"{name}_p50": float(np.median(values)), f"{name}_max": float(max(values))}
    report = Report("trainer, the demo run after run", bars, details={"task": task, "demo_runs": list(found)})
    report.add(Part(ratios, figures))
    return report


def played(run: Path, task: str, *, seed: int = 0, steps: int | None = None, sync_mode: str = "auto") -> dict[str, Any]:
    """The verdict of one run of the demo in the folder `run`, whether it learned or not."""
    given = ["headrace", "demo", "--task", task, "--run", run, "--seed", seed, "--sync-mode", sync_mode]
    return verdict_of(*given, *(["--steps", steps] if steps is not None else []), may_fail=True)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The trainer's metrics of a run, one object a step."""
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
    """So many processes that only compute, until the end of the block."""
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
    """What the CPUs did since the start of the system, in Linux' order: user, nice, system, idle, ..."""
    try:
        return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None


def _stolen(before: list[int] | None, after: list[int] | None) -> float | None:
    if before is None or after is None:
        return None
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return round(spent[STEAL] / max(1, sum(spent)), 3)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
