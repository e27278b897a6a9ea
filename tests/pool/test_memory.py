"""What was consumed leaves memory at once, without the garbage collector."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.pool.kit import Clock

from headrace import DataPool, Step

PROMPT = np.arange(10_000, dtype=np.int32)
#: Bytes of one group's tokens: what is held is told in these.
GROUP = PROMPT.nbytes
#: Bytes from which on a piece of memory is one of tokens.
LARGE = GROUP // 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


def held() -> int:
    """Groups' worth of bytes of tokens in memory, reachable or not. What is small is left out: Python remembers which
    classes are of an abstract one, and how many these are is up to what else this process has imported."""
    sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
    return round(sum(size for size in sizes if size >= LARGE) / GROUP)


def fill(pool: DataPool, first: int, n: int) -> None:
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "response_ids": [3], "step_index": 0, "is_last": True}
    pool.submit_steps([Step(trajectory_uid=f"t{i}", **fields) for i in range(first, first + n)])


@pytest.mark.parametrize("lease_s", [None, 60.0])
def test_consumed_groups_are_freed(no_collector: None, lease_s: float | None) -> None:
    with DataPool(channels={"train": {"replies_kept": 0}}) as pool:
        before = held()
        fill(pool, 0, 40)
        assert held() - before >= 40
        for _ in range(4):
            batch = pool.fetch_batch(10, lease_s=lease_s, timeout=0)
            assert batch is not None
            if lease_s is not None:
                batch.ack()
            del batch
        assert held() - before <= 1


def test_only_what_may_be_asked_for_again_is_kept(no_collector: None) -> None:
    clock = Clock()
    with DataPool(channels={"train": {"replies_kept": 1, "history_size": 3}}, clock=clock) as pool:
        before = held()
        fill(pool, 0, 40)
        for i in range(4):
            assert pool.fetch_batch(10, request_id=f"r{i}", timeout=0) is not None
        assert held() - before >= 40, "none of the answers may have arrived"
        clock.forward(90)
        pool.stats()
        assert held() - before == 10, "the last answer, which holds the history's three as well"
        fill(pool, 100, 1)
        assert pool.fetch_batch(1, request_id="r9", timeout=0) is not None
        assert held() - before == 3, "the history: the last answer is its newest"


def test_what_a_consumer_that_is_gone_took_is_kept_for_minutes_and_no_longer(no_collector: None) -> None:
    clock = Clock()
    with DataPool(clock=clock) as pool:
        before = held()
        fill(pool, 0, 40)
        for i in range(10):
            assert pool.fetch_batch(4, request_id=f"consumer-{i}/1", timeout=0) is not None
        clock.forward(599)
        pool.stats()
        assert held() - before >= 40
        clock.forward(1)
        pool.stats()
        assert held() - before <= 1


def test_a_pool_that_is_closed_holds_nothing(no_collector: None) -> None:
    before = held()
    pool = DataPool()
    fill(pool, 0, 20)
    batch = pool.fetch_batch(5, lease_s=60, request_id="r")
    assert batch is not None
    assert held() - before >= 20
    pool.close()
    del batch
    assert held() - before <= 1
