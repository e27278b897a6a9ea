"""What `headrace bench pool` measures in one process and on the disk, and the bars that all of its figures are held
against. A part is a function of the sizes and of an empty folder; what goes over HTTP or Ray is in files of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from headrace.bench.pool.http import http
from headrace.bench.pool.large import channels, compaction, million
from headrace.bench.pool.load import FULL, QUICK, ConversationSource, PoolSizes, StepSource
from headrace.bench.pool.served import ServedPool
from headrace.bench.report import Bar, BenchReport, Figures, measure_parts
from headrace.bench.timing import in_own_process, in_turn, median, seconds, warm_memory
from headrace.data.step import Step
from headrace.pool.connect import connect
from headrace.pool.embedded import DataPool
from headrace.pool.journal.files import read_layout

BARS = {
    "durable_vs_raw": Bar(
        "fsync'd submits of eight writers over raw write + fdatasync of the same bytes", at_least=0.3
    ),
    "fetch_flat": Bar("time of a fetch of 32 groups, 100,000 groups queued over 10,000", at_most=1.5),
    "submit_flat": Bar("time of a submit, 100,000 groups queued over 10,000", at_most=1.5),
    "memory_vs_unique": Bar("growth of a `pool serve` process over the bytes of unique ids and log-probs", at_most=1.5),
    "journal_vs_unique": Bar("bytes of its journal over the same", at_most=1.2),
    "ray_vs_naive": Bar("steps/s through Ray over one awaited call a step, with lists, into a bare actor", at_least=8),
    "http_vs_json": Bar("steps/s fetched over HTTP, arrays out, over the same as JSON by orjson", at_least=5),
    "pool_million_gib": Bar(
        "GiB of resident memory of a process whose pool has a journal and 1,000,000 steps queued, 8,192 tokens a "
        "trajectory; quick: 100,000 steps with a tenth of `memory_mb`, growth taken ten times",
        at_most=2.0,
    ),
    "million_submit_flat": Bar("time of a submit to that queue over one of 4,096 steps (quick: 100,000)", at_most=1.5),
    "million_fetch_flat": Bar(
        "time of a fetch, and its steps as arrays, of groups that lie in the journal alone over as many of that small "
        "queue (quick: 100,000)",
        at_most=1.5,
    ),
    "lock_ms_max": Bar("ms for which a compaction of 50,000 groups holds the pool's lock at most", at_most=20),
    "channels_flat": Bar("time of a submit, a reward and a fetch, 5,000 channels over one", at_most=1.5),
    "recover_vs_read": Bar("time of a recovery of 100,000 steps over reading the same bytes", at_most=20),
}


def measure(quick: bool = False) -> BenchReport:
    """All figures of the pool; with `quick` at smaller sizes."""
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: PoolSizes, base: Path | None = None) -> BenchReport:
    """Measures every part in turn, each in a folder below `base`."""
    parts = all_parts()  # needs the extra for Ray: said before anything is measured
    report = BenchReport(f"headrace bench pool ({sizes.name})", BARS, details={"sizes": asdict(sizes)})
    return measure_parts(report, parts, sizes, base or scratch())


def all_parts() -> dict[str, Callable[[PoolSizes, Path], Figures]]:
    """The parts by name, in the order in which they are measured."""
    from headrace.bench.pool.ray import through_ray

    return {
        "durable": durable,
        "flat": flat,
        "channels": channels,
        "compaction": compaction,
        "recover": recover,
        "memory": memory,
        "million": million,
        "http": http,
        "ray": through_ray,
    }


def scratch() -> Path | None:
    """The folder for journals: TMPDIR where it is set, else one that lies on a disk and not in memory."""
    disk = Path("/var/tmp")
    return None if os.environ.get("TMPDIR") or not os.access(disk, os.W_OK) else disk


def durable(sizes: PoolSizes, folder: Path) -> Figures:
    """`durable_vs_raw`: fsync'd submits against the disk itself.

    Eight threads submit to one embedded pool; every submit returns once its steps are on the disk. The other side is
    one loop of `os.write` and `os.fdatasync` in the same folder, of the very bytes that the journal wrote, a submit's
    worth at a time: what a log without CRCs, without an index and without a queue behind it would take. One pool and
    one file serve all rounds; between rounds, off the clock, the pool's queue is fetched empty, as a trainer would.
    """
    load = StepSource(sizes)
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
    return Figures(
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
    """Runs all in a thread each, begun together; returns the seconds until the last is done, or raises the first
    error."""
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


FLAT_WARM_UP_ROUNDS = 5


def flat(sizes: PoolSizes, folder: Path) -> Figures:
    """`fetch_flat` and `submit_flat`: a long queue must cost no more than a short one.

    Two embedded pools live side by side, one with 10,000 groups of a standard step each, one with 100,000. They are in
    memory: a disk's share would be the same in both and hide a difference. Each round submits 64 groups to the one and
    then to the other, and fetches as many again, so the queues keep their lengths. What is timed is the call itself.
    """
    load = StepSource(sizes)
    few, many = (_Queue(sizes, load, groups) for groups in (sizes.few_groups, sizes.many_groups))
    in_turn(few.round, many.round, sizes.flat_rounds, warm_up=FLAT_WARM_UP_ROUNDS)
    absolute = {}
    for queue in (few, many):
        absolute[f"submit_ms_{queue.groups}_queued"] = median(queue.submits[FLAT_WARM_UP_ROUNDS:]) * 1e3
        absolute[f"fetch_ms_{queue.groups}_queued"] = median(queue.fetches[FLAT_WARM_UP_ROUNDS:]) * 1e3
    return Figures(
        {
            "fetch_flat": median(many.fetches[FLAT_WARM_UP_ROUNDS:]) / median(few.fetches[FLAT_WARM_UP_ROUNDS:]),
            "submit_flat": median(many.submits[FLAT_WARM_UP_ROUNDS:]) / median(few.submits[FLAT_WARM_UP_ROUNDS:]),
        },
        absolute,
    )


class _Queue:
    """A pool whose queue has the same length before and after every round."""

    def __init__(self, sizes: PoolSizes, load: StepSource, groups: int) -> None:
        self.groups = groups
        self.submits: list[float] = []
        self.fetches: list[float] = []
        self._sizes = sizes
        self._load = load
        self._pool = DataPool(channels={"train": {"max_queue_size": groups + sizes.submit}})
        for at in range(0, groups, sizes.submit):
            self._pool.submit_steps(load.steps(min(sizes.submit, groups - at)))

    def round(self) -> float:
        sizes, pool = self._sizes, self._pool
        steps = self._load.steps(sizes.submit)
        self.submits.append(seconds(lambda: pool.submit_steps(steps)))
        left = sizes.submit
        fetches = []
        while left > 0:
            size = min(left, sizes.fetch_groups)
            took = seconds(lambda size=size: pool.fetch_batch(size, timeout=0))  # type: ignore[misc]
            if size == sizes.fetch_groups:
                fetches.append(took)
            left -= size
        self.fetches.append(median(fetches))
        return self.submits[-1] + self.fetches[-1]


def recover(sizes: PoolSizes, folder: Path) -> Figures:
    """`recover_vs_read`: opening a journal of 100,000 steps against reading its bytes.

    Both happen in a process of their own, as a recovery does, with the files in the page cache: reading them is `read`
    of each file, whole, into memory, one after the other. A recovery checks every CRC and ends with a pool that
    answers.
    """
    journal = folder / "journal"
    _write(sizes, journal)
    size = sum(path.stat().st_size for path in read_layout(journal).segments)
    open_s, read_s = map(
        median,
        in_turn(
            lambda: in_own_process(open_pool, journal, sizes.recovered_steps),
            lambda: in_own_process(read_files, journal),
            sizes.recover_rounds,
        ),
    )
    return Figures(
        {"recover_vs_read": open_s / read_s},
        {
            "recover_s": open_s,
            "recover_steps_per_s": sizes.recovered_steps / open_s,
            "recover_mb_per_s": size / 1e6 / open_s,
            "read_s": read_s,
        },
    )


def _write(sizes: PoolSizes, journal: Path) -> None:
    load = StepSource(sizes)
    # `os` writes the same bytes as `fsync`; how long this takes is not what is measured here.
    with DataPool(journal, durability="os", defaults={"max_queue_size": sizes.recovered_steps}) as pool:
        for at in range(0, sizes.recovered_steps, sizes.submit):
            pool.submit_steps(load.steps(min(sizes.submit, sizes.recovered_steps - at)))


def open_pool(journal: Path, steps: int) -> float:
    """Seconds that opening the journal takes. Raises where it does not have so many steps."""
    warm_memory(_memory_mb(journal))
    pools: list[DataPool] = []
    took = seconds(lambda: pools.append(DataPool(journal)))
    with pools[0] as pool:
        found = pool.stats("train")["ledger"]["queued"]
    if found != steps:
        raise AssertionError(f"{found} of {steps} steps were recovered")
    return took


def read_files(journal: Path) -> float:
    """Seconds that reading all files of a journal takes."""
    warm_memory(_memory_mb(journal))
    return seconds(lambda: [path.read_bytes() for path in read_layout(journal).segments])


def _memory_mb(journal: Path) -> int:
    return 1 + 2 * sum(path.stat().st_size for path in read_layout(journal).segments) // 1_000_000


def memory(sizes: PoolSizes, folder: Path) -> Figures:
    """`memory_vs_unique` and `journal_vs_unique`: what a trajectory costs against its length.

    200 trajectories of 50 turns grow to 32,768 tokens each in a `headrace pool serve` with a journal. Every turn is
    submitted over HTTP with its whole prompt, turn after turn of all trajectories. The bytes of all distinct ids and
    log-probs are compared with the growth of the server's resident memory, after `malloc_trim`, since it answered its
    first submit, and with the bytes of all files in the journal's folder.
    """
    journal = folder / "journal"
    conversations = ConversationSource(sizes)
    with ServedPool("--journal", journal) as server, connect(server.address) as pool:
        pool.submit_steps(StepSource(sizes).steps(1), channel="warm-up")
        before = server.memory()
        start = time.perf_counter()
        sent = 0
        for steps in conversations.submits():
            pool.submit_steps(steps)
            sent += sum(step.prompt_ids.nbytes + step.response_ids.nbytes for step in steps)
        took = time.perf_counter() - start
        grown = server.memory() - before
        kept = pool.stats("train")["ledger"]["queued"]
        on_disk = sum(path.stat().st_size for path in journal.iterdir())
    if kept != sizes.trajectories * sizes.turns:
        raise AssertionError(f"the pool holds {kept} of {sizes.trajectories * sizes.turns} steps")
    unique = conversations.unique_bytes
    return Figures(
        {"memory_vs_unique": grown / unique, "journal_vs_unique": on_disk / unique},
        {
            "unique_mb": unique / 1e6,
            "memory_growth_mb": grown / 1e6,
            "journal_mb": on_disk / 1e6,
            "turns_per_s": kept / took,
            "turns_mb_per_s": sent / 1e6 / took,
        },
    )
