"""`durable_vs_raw`: fsync'd submits against the disk itself.

Eight threads submit to one embedded pool; every submit returns once its steps are on the disk. The other side is one
loop of `os.write` and `os.fdatasync` in the same folder, of the very bytes that the journal wrote, a submit's worth at
a time: what a log without CRCs, without an index and without a queue behind it would take. No file is deleted before
the last round, so that both sides always write to fresh pages.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from headrace.bench.pool.load import Load
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median, seconds
from headrace.data.step import Step
from headrace.pool.embedded import DataPool
from headrace.pool.journal.layout import read_layout


def measure(sizes: Sizes, folder: Path) -> Part:
    load = Load(sizes)
    submits = sizes.writers * sizes.submits_a_writer
    rounds = count()
    written = b""

    def pool_side() -> float:
        nonlocal written
        journal = folder / f"journal-{next(rounds)}"
        work = [load.submits(sizes.submits_a_writer) for _ in range(sizes.writers)]
        with DataPool(journal, durability="fsync") as pool:
            took = _at_once([_writer(pool, some) for some in work])
        written = b"".join(path.read_bytes() for path in read_layout(journal).segments)
        return took

    def raw_side() -> float:
        path = folder / f"raw-{next(rounds)}"
        return seconds(lambda: _write_raw(path, written, submits))

    pool_s, raw_s = map(median, in_turn(pool_side, raw_side, sizes.durable_rounds))
    steps = submits * sizes.submit
    return Part(
        {"durable_vs_raw": raw_s / pool_s},
        {
            "durable_steps_per_s": steps / pool_s,
            "durable_mb_per_s": len(written) / 1e6 / pool_s,
            "durable_submit_ms": pool_s / submits * 1e3,
            "raw_write_ms": raw_s / submits * 1e3,
        },
    )


def _writer(pool: DataPool, work: list[list[Step]]) -> Callable[[], None]:
    def write() -> None:
        for steps in work:
            pool.submit_steps(steps)

    return write


def _at_once(actions: list[Callable[[], None]]) -> float:
    """Seconds until all of them, begun together in a thread each, are done; the first error of one is raised."""
    begin = threading.Barrier(len(actions) + 1)
    errors: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        begin.wait()
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    begin.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    if errors:
        raise errors[0]
    return took


def _write_raw(path: Path, data: bytes, writes: int) -> None:
    view = memoryview(data)
    size = -(-len(data) // writes)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND)
    try:
        for at in range(0, len(data), size):
            part = view[at : at + size]
            while part:
                part = part[os.write(fd, part) :]
            os.fdatasync(fd)
    finally:
        os.close(fd)
