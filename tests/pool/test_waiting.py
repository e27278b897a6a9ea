"""A call that must wait is woken by what it waits for and by nothing else: it does not poll."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.pool.kit import SOON, Clock, Threads, fetched, group, prompts, step, until_blocked

from headrace import DataPool, Step
from headrace.pool.errors import PoolClosed
from headrace.pool.operation import Operation
from headrace.pool.operations import OPERATIONS


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operation of every look that a call took at the pool."""
    seen: list[str] = []
    for kind in OPERATIONS.values():
        for method in {"plan", "read"} & set(vars(kind)):
            _count(monkeypatch, kind, method, seen)
    return seen


def _count(monkeypatch: pytest.MonkeyPatch, kind: type[Operation[Any]], method: str, seen: list[str]) -> None:
    look = getattr(kind, method)

    def counted(operation: Operation[Any], *rest: Any) -> Any:
        seen.append(operation.name)
        return look(operation, *rest)

    monkeypatch.setattr(kind, method, counted)


def test_a_blocked_fetch_looks_once_and_again_when_it_is_woken(looks: list[str], threads: Threads) -> None:
    with DataPool() as pool:
        pool.configure(max_queue_size=100)
        waiting = threads.submit(pool.fetch_batch, 1)
        until_blocked(pool)
        # What does not make a group ready wakes nobody.
        pool.submit_step(step("unfinished"))
        pool.submit_steps(group("elsewhere"), channel="eval")
        pool.set_version(1)
        assert looks.count("fetch") == 1
        pool.submit_steps(group("p"))
        assert prompts(waiting.result(SOON)) == ["p"]
        assert looks.count("fetch") == 2


def test_a_pool_that_was_shut_down_wakes_nobody_who_came_later(looks: list[str], threads: Threads) -> None:
    with DataPool() as pool:
        pool.configure(n_rollouts=1)
        pool.shutdown()
        pool.reopen("train")
        waiting = threads.submit(pool.fetch_batch, 1)
        until_blocked(pool)
        pool.set_version(1)
        assert looks.count("fetch") == 1
        pool.submit_step(step("p", last=True))
        assert prompts(waiting.result(SOON)) == ["p"]
        assert looks.count("fetch") == 2


async def test_an_awaited_fetch_looks_once_and_again_when_it_is_woken(looks: list[str]) -> None:
    with DataPool() as pool:
        pool.configure(max_queue_size=100)
        waiting = asyncio.create_task(pool.aio.fetch_batch(1))
        while pool.stats()["waiting"] < 1:
            await asyncio.sleep(0)
        await pool.aio.submit_step(step("unfinished"))
        await pool.aio.submit_steps(group("p"))
        assert prompts(await waiting) == ["p"]
        assert looks.count("fetch") == 2


def test_a_call_that_gave_up_no_longer_waits() -> None:
    with DataPool() as pool:
        assert pool.fetch_batch(1, timeout=0) is None
        assert pool.fetch_batch(1, timeout=0.01) is None
        assert pool.stats()["waiting"] == 0


async def test_an_awaited_call_that_was_cancelled_no_longer_waits_and_takes_nothing() -> None:
    with DataPool() as pool:
        waiting = asyncio.create_task(pool.aio.fetch_batch(1))
        while pool.stats()["waiting"] < 1:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.stats()["waiting"] == 0
        pool.submit_steps(group("p"))
        assert prompts(fetched(pool)) == ["p"]


async def test_a_thousand_awaited_fetches_need_no_thread_each() -> None:
    before = threading.active_count()  # other tests' servers have theirs
    with DataPool() as pool:
        waiting = [asyncio.create_task(pool.aio.fetch_batch(1)) for _ in range(1000)]
        while pool.stats()["waiting"] < 1000:
            await asyncio.sleep(0)
        assert threading.active_count() < before + 50
        pool.submit_steps([one for i in range(1000) for one in group(f"p{i}")])
        found = await asyncio.gather(*waiting)
        assert len({prompts(batch)[0] for batch in found}) == 1000


def test_closing_a_pool_ends_who_waits_in_it(threads: Threads) -> None:
    pool = DataPool()
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    pool.close()
    with pytest.raises(PoolClosed, match="closed"):
        waiting.result(SOON)
    with pytest.raises(PoolClosed):
        pool.submit_step(step("t"))


def test_a_deadline_that_lies_centuries_ahead_can_be_waited_for(threads: Threads) -> None:
    with DataPool(clock=Clock()) as pool:
        pool.configure(group_timeout_s=1e18)
        pool.submit_step(step("t"))
        waiting = threads.submit(pool.fetch_batch, 1, timeout=1e18)
        until_blocked(pool)
        pool.complete("t")
        assert prompts(waiting.result(SOON)) == ["t"]


async def test_a_wait_that_is_cancelled_as_it_wakes_ends() -> None:
    with DataPool() as pool:
        waiting = asyncio.create_task(pool.aio.fetch_batch(2, timeout=600))
        await asyncio.sleep(0)
        pool.submit_step(Step(prompt_ids=[1], response_ids=[2], trajectory_uid="one", is_last=True))
        asyncio.get_running_loop().call_soon(waiting.cancel)  # right behind the wake-up
        done, _ = await asyncio.wait({waiting}, timeout=60)
        assert done
        assert waiting.cancelled()
        assert pool.stats("train")["groups"]["ready"] == 1


async def test_who_waits_longest_is_woken_first() -> None:
    with DataPool() as pool:
        waiting = []
        for number in range(20):
            waiting.append(asyncio.create_task(pool.aio.fetch_batch(1)))
            while pool.stats()["waiting"] <= number:
                await asyncio.sleep(0)
        for number in range(20):
            await pool.aio.submit_steps(group(f"p{number}"))
            assert prompts(await waiting[number]) == [f"p{number}"]
