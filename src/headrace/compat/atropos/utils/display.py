"""`atroposlib.utils.display`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
NUMBERS = ("Value", "Stderr")


def display_metrics_table(task_name: str, metrics: Mapping[str, Any], start_time: float, end_time: float) -> None:
    """Prints an evaluation's metrics as a table in Markdown."""
    rows = [
        (
            task_name,
            "1",
            "none",
            "",
            name.replace("eval/", "").replace("_", " "),
            _arrow(name),
            f"{value:.4f}",
            "±",
            "0.0000",
        )
        for name, value in metrics.items()
    ]
    widths = [max(3, *(len(row[at]) for row in (COLUMNS, *rows))) for at in range(len(COLUMNS))]
    print(f"\nEvaluation Results: {task_name}")
    print(_line(COLUMNS, widths))
    marks = ["-" * (width - 1) + (":" if name in NUMBERS else "-") for name, width in zip(COLUMNS, widths, strict=True)]
    print(_line(marks, widths))
    for row in rows:
        print(_line(row, widths))
    print(f"Evaluation completed in {end_time - start_time:.2f} seconds")


def _line(cells: tuple[str, ...] | list[str], widths: list[int]) -> str:
    pairs = zip(COLUMNS, cells, widths, strict=True)
    return "|" + "|".join(cell.rjust(w) if name in NUMBERS else cell.ljust(w) for name, cell, w in pairs) + "|"


def _arrow(name: str) -> str:
    return "↑" if "correct" in name or "acc" in name else ""
