"""What `headrace bench pool` measures of large pools: a million steps queued, a compaction under load, thousands of
channels."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headrace.bench.pool.load import VOCABULARY, PoolSizes, StepSource
from headrace.bench.report import Figures
from headrace.bench.timing import in_own_process, in_turn, median, seconds
from headrace.data.step import Step
from headrace.pool.config import DEFAULT_MEMORY_MB, Limits
from headrace.pool.embedded import DataPool

MILLION = 1_000_000
WARM_UP_ROUNDS = 3


class GroupSource:
    """Groups of trajectories of many turns: each turn builds on all that was said before, so every token is sent and
    kept once. Tokens repeat from group to group, uids never do."""

    def __init__(self, sizes: PoolSizes, seed: int = 2) -> None:
        self.sizes = sizes
        random = np.random.default_rng(seed)
        shape = (sizes.rollouts, sizes.million_tokens)
        self._ids = random.integers(0, VOCABULARY, shape, dtype=np.int32)
        self._log_probs = -random.random(sizes.response, dtype=np.float32)
        self._made = 0

    @property
    def steps_a_group(self) -> int:
        return self.sizes.rollouts * self.sizes.million_turns

    def groups(self, count: int) -> list[list[Step]]:
        """So many groups, complete and rewarded, the steps of each."""
        return [self._group() for _ in range(count)]

    def _group(self) -> list[Step]:
        sizes, number = self.sizes, self._made
        self._made += 1
        steps: list[Step] = []
        for rollout in range(sizes.rollouts):
            for turn in range(sizes.million_turns):
                begin, end = (sizes.million_tokens * at // sizes.million_turns for at in (turn, turn + 1))
                steps.append(
                    Step(
                        prompt_ids=self._ids[rollout, begin : end - sizes.response],
                        response_ids=self._ids[rollout, end - sizes.response : end],
                        rollout_log_probs=self._log_probs,
                        trajectory_uid=f"task-{number}-rollout-{rollout}",
                        prompt_uid=f"task-{number}",
                        step_index=turn,
                        builds_on=(turn - 1, begin) if turn else None,
                        is_last=turn == sizes.million_turns - 1,
                        reward=1.0,
                        policy_version=0,
                    )
                )
        return steps


def million(sizes: PoolSizes, folder: Path) -> Figures:
    """`pool_million_gib`, `million_submit_flat` and `million_fetch_flat`: a queue that is larger than memory.

    A process of its own fills an embedded pool with a journal with a million steps: trajectories of 8,192 tokens in
    eight turns, eight of them a group, 5 GB of ids and log-probs. `pool_million_gib` is the resident memory of the
    whole process, after `malloc_trim`, in GiB. With `quick` there are 100,000 steps and a tenth of the pool's
    `memory_mb`, and what the process grew by is taken ten times.

    Beside it stands a pool with few groups, which fit into memory. Each round submits four groups to the one and then
    to the other, and fetches the newest four again, as steps with their arrays: of the large pool those lie in the
    journal alone.
    """
    found = in_own_process(measure_million, sizes, folder)
    return Figures(
        {name: found.pop(name) for name in ("pool_million_gib", "million_submit_flat", "million_fetch_flat")}, found
    )


GROUPS_A_ROUND = 4


def measure_million(sizes: PoolSizes, folder: Path) -> dict[str, float]:
    """The figures of `million`, by name."""
    share = sizes.million_steps / MILLION
    load = GroupSource(sizes)
    few = _Journaled(sizes, load, folder / "few", sizes.few_million_groups, DEFAULT_MEMORY_MB)
    before = resident_bytes()
    start = time.perf_counter()
    groups = -(-sizes.million_steps // load.steps_a_group)
    many = _Journaled(sizes, load, folder / "many", groups, DEFAULT_MEMORY_MB * min(1.0, share))
    filled_s = time.perf_counter() - start
    grown = resident_bytes() - before
    in_turn(few.round, many.round, sizes.million_rounds, warm_up=WARM_UP_ROUNDS)
    stats = many.pool.stats()
    steps = stats["ledger"]["queued"]
    for each in (few, many):
        each.pool.close()
    return {
        "pool_million_gib": (before + grown / share) / 2**30,
        "million_submit_flat": median(many.submits) / median(few.submits),
        "million_fetch_flat": median(many.fetches) / median(few.fetches),
        "million_steps_queued": float(steps),
        "million_in_journal_gb": stats["in_journal_bytes"] / 1e9,
        "million_fill_steps_per_s": steps / filled_s,
        "million_index_bytes_a_step": max(1.0, (grown - stats["memory_bytes"]) / steps),
        "million_submit_ms": median(many.submits) * 1e3,
        "million_fetch_ms": median(many.fetches) * 1e3,
        "few_submit_ms": median(few.submits) * 1e3,
        "few_fetch_ms": median(few.fetches) * 1e3,
    }


class _Journaled:
    """A pool with a journal whose queue has the same length before and after every round."""

    def __init__(self, sizes: PoolSizes, load: GroupSource, folder: Path, groups: int, memory_mb: float) -> None:
        self.submits: list[float] = []
        self.fetches: list[float] = []
        self._load = load
        defaults = {"n_rollouts": sizes.rollouts, "max_queue_size": groups + 2 * GROUPS_A_ROUND}
        # `os` writes the same bytes as `fsync`: a disk's share would be the same in both and hide a difference.
        self.pool = DataPool(folder, durability="os", defaults=defaults, limits=Limits(memory_mb=memory_mb))
        for _ in range(groups):
            self.pool.submit_steps(load.groups(1)[0])

    def round(self) -> float:
        made = self._load.groups(GROUPS_A_ROUND)
        self.submits.append(median([seconds(lambda steps=steps: self.pool.submit_steps(steps)) for steps in made]))  # type: ignore[misc]
        self.fetches.append(seconds(self._fetch))
        return self.submits[-1] + self.fetches[-1]

    def _fetch(self) -> None:
        batch = self.pool.fetch_batch(GROUPS_A_ROUND, order="latest", timeout=0)
        assert batch is not None
        assert batch.steps


def resident_bytes() -> int:
    """This process's resident memory; what the allocator keeps of freed memory does not count."""
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def compaction(sizes: PoolSizes, folder: Path) -> Figures:
    """`lock_ms_max`: how long a compaction keeps everyone waiting.

    An embedded pool holds 50,000 groups of a standard step, with a journal. It is compacted three times, while another
    thread submits a step and fetches it again, without a pause. What counts is the longest time for which the thread
    that compacts held the pool's lock, in ms.
    """
    load = StepSource(sizes)
    with DataPool(folder / "journal", durability="os", defaults={"max_queue_size": sizes.compacted_groups + 1}) as pool:
        for at in range(0, sizes.compacted_groups, sizes.submit):
            pool.submit_steps(load.steps(min(sizes.submit, sizes.compacted_groups - at)))
        held = _HoldTimes(pool._lock)
        pool._lock = held  # type: ignore[assignment]
        calls: list[float] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                [step] = load.steps(1)
                calls.append(seconds(lambda: pool.submit_steps([step])))  # noqa: B023 - called at once
                calls.append(seconds(lambda: pool.fetch_batch(1, order="latest", timeout=0)))

        worker = threading.Thread(target=work)
        worker.start()
        try:
            took = [seconds(pool.compact) for _ in range(sizes.compaction_rounds)]
        finally:
            stop.set()
            worker.join()
        thread = threading.get_ident()
        return Figures(
            {"lock_ms_max": held.longest[thread] * 1e3},
            {
                "lock_cpu_ms_max": held.longest_cpu[thread] * 1e3,
                "compaction_s": median(took),
                "call_ms_while_compacting": median(calls) * 1e3,
                "call_ms_max_while_compacting": max(calls) * 1e3,
            },
        )


class _HoldTimes:
    """A lock that notes, by thread, the longest time for which it was held, and the most that the thread computed
    meanwhile: on a busy machine a thread that holds it may itself have to wait."""

    def __init__(self, lock: Any) -> None:
        self.longest: dict[int, float] = {}
        self.longest_cpu: dict[int, float] = {}
        self._lock = lock
        self._since = self._cpu_since = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since, self._cpu_since = time.perf_counter(), time.thread_time()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        held, computed, thread = (
            time.perf_counter() - self._since,
            time.thread_time() - self._cpu_since,
            threading.get_ident(),
        )
        self.longest[thread] = max(held, self.longest.get(thread, 0.0))
        self.longest_cpu[thread] = max(computed, self.longest_cpu.get(thread, 0.0))
        self._lock.release()


def channels(sizes: PoolSizes, folder: Path) -> Figures:
    """`channels_flat`: a pool of 5,000 channels must cost no more than a pool of one.

    Two embedded pools in memory live side by side. A round is one submit of a step, one reward that names no channel,
    and one fetch, in the one and then in the other.
    """
    load = StepSource(sizes)
    few, many = (_channel_rounds(load, count) for count in (1, sizes.many_channels))
    few_s, many_s = map(median, in_turn(few, many, sizes.channel_rounds, warm_up=WARM_UP_ROUNDS))
    return Figures(
        {"channels_flat": many_s / few_s},
        {"call_ms_1_channel": few_s / 3 * 1e3, f"call_ms_{sizes.many_channels}_channels": many_s / 3 * 1e3},
    )


def _channel_rounds(load: StepSource, count: int) -> Callable[[], float]:
    pool = DataPool(limits=Limits(max_channels=count))
    for number in range(count):
        pool.submit_steps(load.steps(1), f"channel-{number}")
    name = f"channel-{count // 2}"

    def round() -> float:
        [step] = load.steps(1)
        took = seconds(lambda: pool.submit_steps([step], name))
        took += seconds(lambda: pool.reward(step.trajectory_uid, 0.5))
        return took + seconds(lambda: pool.fetch_batch(1, channel=name, timeout=0))

    return round
