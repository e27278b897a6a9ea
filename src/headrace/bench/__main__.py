"""`python -m headrace.bench NAME [--quick] [--runs N] [--json FILE]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace.bench import NAMES, benchmark
from headrace.data.errors import HeadraceError


def main() -> int:
    """Runs a benchmark by the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m headrace.bench", description="Measure a part of Headrace.")
    parser.add_argument("name", help=f"what to measure: {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: ends within two minutes on two cores")
    parser.add_argument("--runs", type=int, help="trainer: run the demo so often, seed by seed; who learned?")
    parser.add_argument("--busy", type=int, default=0, help="trainer: so many of the runs on cores that are kept busy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    given = parser.parse_args()
    try:
        return benchmark(given.name, quick=given.quick, json_path=given.json, runs=given.runs, busy=given.busy)
    except HeadraceError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
