"""The awaitable twins: the same calls, for code that must not block."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.pool.kit import SOON, group, keys, prompts, step, trajectory

from headrace.data import InvalidInput
from headrace.pool import remote
from headrace.pool.errors import Conflict, LeaseLost, NotFound


@pytest.fixture
async def aio(pool: Any) -> AsyncIterator[Any]:
    yield pool.aio
    if hasattr(pool, "aclose"):
        await pool.aclose()


async def until_waiting(aio: Any, calls: int) -> None:
    give_up = time.monotonic() + SOON
    while (await aio.stats())["waiting"] != calls:
        assert time.monotonic() < give_up, f"never {calls} calls that wait"
        await asyncio.sleep(0)


async def test_a_whole_life_without_blocking(aio: Any) -> None:
    await aio.configure(n_rollouts=1, history_size=1)
    await aio.set_version(2)
    await aio.open("t", "p", metadata={"task": 1})
    receipt = await aio.submit_steps([step("t", 0, "p"), step("t", 1, "p")])
    assert receipt.accepted == 2
    assert (await aio.submit_step(step("t", 0, "p"))).duplicates == 1
    assert await aio.reward("t", 0.5, step_index=0) == "ok"
    await aio.curate("t", 0, trainable=False)
    assert (await aio.complete("t", reward=1.0)).steps == 2
    assert await aio.complete_trajectory("nobody") is False
    assert (await aio.trajectory("t")).complete
    batch = await aio.fetch_batch(1, lease_s=600, timeout=SOON)
    assert keys(batch.steps) == [("t", 0), ("t", 1)]
    assert await batch.extend(900) > batch.deadline
    await batch.nack()
    again = await aio.fetch_batch(1, lease_s=600)
    assert again.groups[0].deliveries == 2
    await again.ack()
    assert (await aio.stats("train"))["ledger"]["consumed"] == 2
    assert [event.kind for event in await aio.events()] == ["config", "version", "redelivery"]
    assert (await aio.list_groups())["items"] == []
    assert (await aio.list_trajectories())["items"] == []
    assert (await aio.list_steps())["items"] == []
    assert await aio.forget("t") is True
    await aio.shutdown()
    assert await aio.fetch_batch(1) is None


async def test_errors_are_raised_where_they_are_awaited(aio: Any) -> None:
    await aio.submit_step(step("t"))
    with pytest.raises(Conflict):
        await aio.submit_step(step("t", response_ids=[8, 9]))
    with pytest.raises(LeaseLost):
        await aio.ack("nobody")
    with pytest.raises(NotFound):
        await aio.trajectory("nobody")
    with pytest.raises(InvalidInput, match="batch_size"):
        await aio.fetch_batch(0)
    assert await aio.fetch_batch(1, timeout=0) is None
    assert await aio.fetch_batch(1, timeout=0.02) is None


async def test_an_awaited_fetch_is_woken_by_a_submit(aio: Any) -> None:
    waiting = asyncio.create_task(aio.fetch_batch(2))
    await until_waiting(aio, 1)
    await aio.submit_steps([*group("a"), *group("b")])
    assert prompts(await asyncio.wait_for(waiting, SOON)) == ["a", "b"]


async def test_an_awaited_submit_waits_for_room(aio: Any) -> None:
    await aio.configure(max_queue_size=1, overflow="block")
    await aio.submit_steps(group("a"))
    waiting = asyncio.create_task(aio.submit_steps(group("b")))
    await until_waiting(aio, 1)
    assert prompts(await aio.fetch_batch(1)) == ["a"]
    assert (await asyncio.wait_for(waiting, SOON)).accepted == 1


async def test_a_cancelled_fetch_takes_nothing(aio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PIECE_S", 4 * SOON)
    waiting = asyncio.create_task(aio.fetch_batch(1))
    await until_waiting(aio, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    # Sooner than a remote wait would end by itself.
    await until_waiting(aio, 0)
    await aio.submit_steps(group("p"))
    assert prompts(await aio.fetch_batch(1, timeout=SOON)) == ["p"]


async def test_writers_and_trainers_share_one_loop(aio: Any) -> None:
    async def write(writer: int) -> None:
        for i in range(10):
            await aio.submit_steps(trajectory(f"w{writer}/{i}", 2))

    async def train(taken: Counter[str]) -> None:
        while (batch := await aio.fetch_batch(2, lease_s=600)) is not None:
            taken.update(prompts(batch))
            await batch.ack()

    taken: Counter[str] = Counter()
    trainers = [asyncio.create_task(train(taken)) for _ in range(2)]
    await asyncio.gather(*(write(i) for i in range(8)))
    await aio.shutdown()
    await asyncio.wait_for(asyncio.gather(*trainers), SOON)
    assert len(taken) == 80
    assert set(taken.values()) == {1}
