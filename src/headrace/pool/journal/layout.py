"""Names of the journal's files, and which of them a recovery reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOCK = "lock"
MARK = "mark"
RESERVE = "reserve"


@dataclass(frozen=True, slots=True)
class Layout:
    """The newest snapshot and the segments from it on. `missing` numbers should be there and are not."""

    snapshot: Path | None
    segments: list[Path]
    missing: list[int]
    outdated: list[Path]


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.seg"


def snapshot_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.snap"


def number_of(path: Path) -> int:
    return int(path.stem)


def read_layout(directory: Path) -> Layout:
    snapshots = sorted(p for p in directory.glob("*.snap") if p.stem.isdigit())
    segments = sorted(p for p in directory.glob("*.seg") if p.stem.isdigit())
    snapshot = snapshots[-1] if snapshots else None
    first = number_of(snapshot) if snapshot else 1
    live = [path for path in segments if number_of(path) >= first]
    outdated = [*snapshots[:-1], *(path for path in segments if number_of(path) < first), *directory.glob("*.tmp")]
    numbers = {number_of(path) for path in live}
    # A snapshot comes after its segment, mark and reserve after the first: none of them exists without it.
    begun = snapshot is not None or any((directory / name).exists() for name in (MARK, RESERVE))
    expected = range(first, max(numbers) + 1 if numbers else first + begun)
    return Layout(snapshot, live, [n for n in expected if n not in numbers], outdated)
