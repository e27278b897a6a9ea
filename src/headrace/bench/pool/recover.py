"""`recover_vs_read`: opening a journal of 100,000 steps against reading its bytes.

Both happen in a process of their own, as a recovery does, with the files in the page cache: reading them is `read` of
each file, whole, into memory, one after the other. A recovery checks every CRC and ends with a pool that answers.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.apart import apart
from headrace.bench.pool.load import Load
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median, seconds, warm_memory
from headrace.pool.embedded import DataPool
from headrace.pool.journal.files import read_layout


def measure(sizes: Sizes, folder: Path) -> Part:
    journal = folder / "journal"
    _write(sizes, journal)
    size = sum(path.stat().st_size for path in read_layout(journal).segments)
    open_s, read_s = map(
        median,
        in_turn(
            lambda: apart(open_pool, journal, sizes.recovered_steps),
            lambda: apart(read_files, journal),
            sizes.recover_rounds,
        ),
    )
    return Part(
        {"recover_vs_read": open_s / read_s},
        {
            "recover_s": open_s,
            "recover_steps_per_s": sizes.recovered_steps / open_s,
            "recover_mb_per_s": size / 1e6 / open_s,
            "read_s": read_s,
        },
    )


def _write(sizes: Sizes, journal: Path) -> None:
    load = Load(sizes)
    # `os` writes the same bytes as `fsync`; how long this takes is not what is measured here.
    with DataPool(journal, durability="os", defaults={"max_queue_size": sizes.recovered_steps}) as pool:
        for at in range(0, sizes.recovered_steps, sizes.submit):
            pool.submit_steps(load.steps(min(sizes.submit, sizes.recovered_steps - at)))


def open_pool(journal: Path, steps: int) -> float:
    """Seconds of a recovery, which must find so many steps."""
    warm_memory(_memory_mb(journal))
    pools: list[DataPool] = []
    took = seconds(lambda: pools.append(DataPool(journal)))
    with pools[0] as pool:
        found = pool.stats("train")["ledger"]["queued"]
    if found != steps:
        raise AssertionError(f"{found} of {steps} steps were recovered")
    return took


def read_files(journal: Path) -> float:
    warm_memory(_memory_mb(journal))
    return seconds(lambda: [path.read_bytes() for path in read_layout(journal).segments])


def _memory_mb(journal: Path) -> int:
    return 1 + 2 * sum(path.stat().st_size for path in read_layout(journal).segments) // 1_000_000
