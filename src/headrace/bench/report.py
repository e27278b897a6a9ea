"""What a benchmark found: ratios with their bars, absolute figures, and the environment they hold for."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import orjson
from rich.console import Console
from rich.table import Table

S = TypeVar("S")

#: Whose versions a report names.
LIBRARIES = ("headrace", "numpy", "msgspec", "orjson", "crc32c", "uvicorn", "starlette", "aiohttp", "ray")


@dataclass(frozen=True, slots=True)
class Bar:
    """What a ratio means, and the value that it must reach, or must not exceed; with neither it is only told."""

    meaning: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value is on the right side."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else "reported"


@dataclass(slots=True)
class Figures:
    """One part's figures: `ratios` by the keys of the bars, `absolute` with their unit at the end of the name."""

    ratios: dict[str, float]
    absolute: dict[str, float]


@dataclass(slots=True)
class BenchReport:
    """All figures of one benchmark. `details` join the environment in the JSON."""

    title: str
    bars: dict[str, Bar]
    ratios: dict[str, float] = field(default_factory=dict)
    absolute: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, part: Figures) -> None:
        self.ratios.update(part.ratios)
        self.absolute.update(part.absolute)

    def as_dict(self) -> dict[str, Any]:
        """The ratios as plain numbers at the top, by the order of the bars, then everything else."""
        return {
            **{key: _rounded(self.ratios[key]) for key in self.bars},
            "absolute": {name: _rounded(value) for name, value in self.absolute.items()},
            "environment": {**environment(), **self.details},
        }

    def write(self, path: Path) -> None:
        """Writes `as_dict` as JSON."""
        path.write_bytes(orjson.dumps(self.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def print(self) -> None:
        """Prints the ratios with their bars, and the absolute figures."""
        table = Table(title=self.title, title_justify="left", header_style="bold")
        for name in ("key", "measured", "bar", "what"):
            table.add_column(name, justify="right" if name in ("measured", "bar") else "left")
        for key, bar in self.bars.items():
            value = self.ratios[key]
            table.add_row(key, f"[{'green' if bar.met(value) else 'red'}]{value:.3g}", str(bar), bar.meaning)
        console = Console()
        console.print(table)
        figures = Table(header_style="bold")
        figures.add_column("figure")
        figures.add_column("value", justify="right")
        for name, value in self.absolute.items():
            figures.add_row(name, f"{value:,.0f}" if value >= 1000 else f"{value:.3g}")
        console.print(figures)


def measure_parts(
    report: BenchReport,
    parts: Mapping[str, Callable[[S, Path], Figures]],
    sizes: S,
    base: Path | None = None,
) -> BenchReport:
    """Adds every part to the report, in turn, each in a folder of its own below `base`, gone before the next begins.

    The part's name and its ratios are told on stderr as they come.
    """
    console = Console(stderr=True)
    for name, part in parts.items():
        console.print(f"{name} ...", end=" ", style="dim")
        with TemporaryDirectory(prefix="headrace-bench-", dir=base) as folder:
            found = part(sizes, Path(folder))
        console.print(", ".join(f"{key} {value:.3g}" for key, value in found.ratios.items()), highlight=False)
        report.add(found)
    return report


def environment() -> dict[str, Any]:
    """What the figures depend on and what may be told: no host, no user, no path."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {name: version for name in LIBRARIES if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _rounded(value: float) -> float:
    """To four places, or four digits where it is smaller than that: a gap of 1e-7 is not 0."""
    return round(value, 4) if abs(value) >= 1e-2 else float(f"{value:.4g}")
