"""Benchmarks. Each prints ratios against a named limit or peer, measured in the same run on the same machine."""

from __future__ import annotations

import importlib
from pathlib import Path

from headrace.bench import report
from headrace.data.errors import InvalidInput
from headrace.files import check_place

#: What can be measured, and the module whose `measure(quick)` does it.
NAMES = {name: f"headrace.bench.{name}.measure" for name in ("pool", "gateway", "trainer", "envs", "api", "run")}


def benchmark(
    name: str, *, quick: bool = False, json_path: Path | None = None, runs: int | None = None, busy: int = 0
) -> int:
    """Measures `name`, prints a table, and writes the figures to `json_path` where one is given; returns an exit code.
    Raises `InvalidInput` for an unknown name or options of another benchmark.

    `runs` and `busy` are the trainer's: so many runs of the demo, the last `busy` of them on busy cores.
    """
    if name not in NAMES:
        raise InvalidInput(f"no benchmark {name!r}; known: {', '.join(NAMES)}")
    if json_path is not None:
        check_place(json_path)
    if name != "trainer" and (runs is not None or busy):
        raise InvalidInput(
            f"--runs and --busy are for the benchmark trainer, whose demo is run so often; not for {name}"
        )
    given = {"runs": runs, "busy": busy} if name == "trainer" else {}
    found: report.BenchReport = importlib.import_module(NAMES[name]).measure(quick, **given)
    found.print()
    if json_path is not None:
        found.write(json_path)
    return 0
