"""`durable_vs_raw`: fsync'd submits against the disk itself.

Eight threads submit to one embedded pool; every submit returns once its steps are on the disk. The other side is one
loop of `os.write` and `os.fdatasync` in the same folder, of the very bytes that the journal wrote, a submit's worth at
a time: what a log without CRCs, without an index and without a queue behind it would take. One pool and one file serve
all rounds; between rounds, off the clock, the pool's queue is fetched empty, as a trainer would.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.bench.pool.load import Load
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median, seconds
from headrace.data.step import Step
from headrace.pool.embedded import DataPool
from headrace.pool.journal.files import read_layout


def measure(sizes: Sizes, folder: Path) -> Part:
    load = Load(sizes)
    submits = sizes.writers * sizes.submits_a_writer
    journal = folder / "journal"
    written = b""

    def pool_side() -> float:
        nonlocal written
        work = [load.submits(sizes.submits_a_writer) for _ in range(sizes.writers)]
        took = _at_once([_writer(pool, some) for some in work])
        if not written:
            written = b"".join(path.read_bytes() for path in read_layout(journal).segments)
        pool.fetch_batch(submits * sizes.submit, timeout=0)
        return took

    def raw_side() -> float:
        return seconds(lambda: _write_raw(raw, written, submits))

    raw = os.open(folder / "raw", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND)
    try:
        with DataPool(journal, durability="fsync") as pool:
            pool_s, raw_s = map(median, in_turn(pool_side, raw_side, sizes.durable_rounds))
    finally:
        os.close(raw)
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


def _write_raw(fd: int, data: bytes, writes: int) -> None:
    view = memoryview(data)
    size = -(-len(data) // writes)
    for at in range(0, len(data), size):
        part = view[at : at + size]
        while part:
            part = part[os.write(fd, part) :]
        os.fdatasync(fd)
