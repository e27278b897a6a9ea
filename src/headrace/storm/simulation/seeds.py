"""Many simulations, one after the other: what they came to, and how to play those again that found something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from headrace.storm.checker import KINDS
from headrace.storm.simulation.simulation import OPERATIONS, Played, play


class Summary(msgspec.Struct, frozen=True):
    """`figures`: operations, seconds of simulated time, starts of the pool, steps, and faults by kind; `counts`:
    findings by kind; `failed`: the seeds that had any."""

    figures: dict[str, int]
    counts: dict[str, int]
    failed: list[int]


def play_seeds(
    seeds: Iterable[int],
    *,
    operations: int = OPERATIONS,
    folder: Path | None = None,
    tell: Callable[[str], None] = print,
    most_told: int = 20,
) -> Summary:
    """Plays a simulation for each seed. Where one finds something, that and how to play it again is told; its log, or
    with a single seed any, goes to a folder of its own in `folder` where one is given."""
    figures: Counter[str] = Counter()
    counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    failed: list[int] = []
    for seed in seeds:
        played = play(seed, operations=operations, folder=folder / f"seed-{seed}" if folder is not None else None)
        figures.update(_figures(played))
        counts.update(played.report.counts)
        if played.report.clean:
            tell(
                f"seed {seed}: {played.operations} operations in {played.virtual_s:.0f} simulated seconds, no findings"
            )
            continue
        failed.append(seed)
        for finding in played.report.findings[:most_told]:
            tell(f"seed {seed}: {finding.kind}: {finding.subject}: {finding.what}")
        if len(played.report.findings) > most_told:
            tell(f"seed {seed}: and {len(played.report.findings) - most_told} more")
        again = f"headrace storm --simulate --seed {seed} --seeds 1 --operations {operations} --folder FOLDER"
        tell(f"seed {seed}: play it again with `{again}`")
    return Summary(dict(figures), dict(counts), failed)


def _figures(played: Played) -> dict[str, int]:
    told = played.report.figures
    return {
        "operations": played.operations,
        "virtual_s": round(played.virtual_s),
        "starts": played.starts,
        **{name: told[name] for name in ("trajectories", "steps", "redelivered", "ledgers")},
        **played.faults,
    }
