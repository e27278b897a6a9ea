"""The outbox: a channel that takes nothing holds up its own steps alone, and nothing ends the tasks that send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from headrace import DataPool, Step
from headrace.data.errors import ForeignFrame
from headrace.data.packing import pack
from headrace.gateway import outbox as module
from headrace.gateway.outbox import MAX_TRIES, Outbox, OutboxEntry
from headrace.pool.errors import InternalError, PoolFull, PoolUnreachable, UnreadableAnswer
from headrace.pool.operations.submit import SubmitBlock

PATIENCE_S = 120


class Elsewhere:
    """A pool whose answers can be spoilt: `spoilt` is asked before each submit, and may raise."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool
        self.spoilt: Any = lambda channel, uids: None

    async def execute_async(self, operation: SubmitBlock) -> Any:
        self.spoilt(operation.channel, [head.trajectory_uid for head in operation.block.heads])
        return await self._pool.execute_async(operation)


@pytest.fixture
def elsewhere(pool: DataPool) -> Elsewhere:
    return Elsewhere(pool)


@pytest.fixture
def lost() -> list[tuple[str, int, str]]:
    return []


@pytest.fixture
async def outbox(
    elsewhere: Elsewhere, lost: list[tuple[str, int, str]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Outbox]:
    monkeypatch.setattr(module, "RETRY_INTERVAL_S", 0.001)
    found = Outbox(
        elsewhere,  # type: ignore[arg-type]
        most=1_000_000,
        file=None,
        lost=lambda channel, count, reason, error: lost.append((channel, count, reason)),
    )
    await found.start()
    yield found
    await found.close(0)


async def put(outbox: Outbox, channel: str, uid: str) -> OutboxEntry:
    step = Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid="p", step_index=0)
    entry = OutboxEntry(channel, pack([step]), lambda receipt: None)
    assert await outbox.put(entry)
    return entry


async def sent(entry: OutboxEntry) -> None:
    await asyncio.wait_for(entry.sent.wait(), PATIENCE_S)


async def test_what_a_step_brings_with_it_counts_for_the_room_that_it_takes(
    outbox: Outbox, elsewhere: Elsewhere, lost: list[tuple[str, int, str]]
) -> None:
    def away(channel: str, uids: list[str]) -> None:
        raise PoolUnreachable("gone")

    elsewhere.spoilt = away
    experts = np.zeros((3, 100, 1000), np.uint8)
    for at in range(4):
        step = Step(
            prompt_ids=[1], response_ids=[2, 3], trajectory_uid=f"t{at}", prompt_uid="p", routed_experts=experts + at
        )
        await outbox.put(OutboxEntry("train", pack([step]), lambda receipt: None))
    assert lost == [("train", 1, "outbox_full")]
    assert 900_000 < outbox.bytes < 1_000_000


async def test_a_full_channel_holds_up_neither_others_nor_what_waits_for_theirs(
    outbox: Outbox, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def spoilt(channel: str, uids: list[str]) -> None:
        if channel == "val" and full:
            raise PoolFull("no room")

    elsewhere.spoilt = spoilt
    held = await put(outbox, "val", "v")
    await sent(await put(outbox, "train", "t"))
    await outbox.flushed("t")
    assert (outbox.waiting, held.sent.is_set()) == (1, False)
    assert outbox.trouble is not None
    assert "no room" in outbox.trouble
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.01)
    for of in (("v",), ()):
        with pytest.raises(PoolUnreachable, match="1 calls wait for the pool"):
            await outbox.flushed(*of)
    full = False
    await sent(held)
    await outbox.flushed()
    assert outbox.trouble is None


async def test_whatever_happens_to_a_sender_it_goes_on_and_that_is_shown(
    outbox: Outbox, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str | None] = []

    def spoilt(channel: str, uids: list[str]) -> None:
        seen.append(outbox.trouble)
        if len(seen) < 3:
            raise RuntimeError("nobody thought of this")

    elsewhere.spoilt = spoilt
    await sent(await put(outbox, "train", "t"))
    assert seen[0] is None
    assert all(said is not None and "nobody thought of this" in said for said in seen[1:])
    assert sum("the sender of channel 'train' failed" in record.message for record in caplog.records) == 2


async def test_a_fault_of_the_pools_is_tried_again_and_then_only_its_own_call_is_lost(
    outbox: Outbox, elsewhere: Elsewhere, pool: DataPool, lost: list[tuple[str, int, str]]
) -> None:
    tried: list[list[str]] = []

    def spoilt(channel: str, uids: list[str]) -> None:
        tried.append(uids)
        if "bad" in uids:
            raise InternalError("a fault of the pool's own")

    def first(channel: str, uids: list[str]) -> None:
        raise PoolUnreachable("not yet")  # so that all three go in one call

    elsewhere.spoilt = first
    entries = [await put(outbox, "train", uid) for uid in ("a", "bad", "b")]
    elsewhere.spoilt = spoilt
    for entry in entries:
        await sent(entry)
    assert lost == [("train", 1, "internal")]
    assert len([uids for uids in tried if "bad" in uids]) >= 2 * MAX_TRIES
    assert pool.stats("train")["ledger"]["submitted"] == 2


@pytest.mark.parametrize("error", [ForeignFrame("a frame of format version 2"), UnreadableAnswer("what came back")])
async def test_a_pool_that_is_yet_to_be_upgraded_is_waited_for(
    outbox: Outbox, elsewhere: Elsewhere, pool: DataPool, lost: list[tuple[str, int, str]], error: Exception
) -> None:
    left = 3

    def spoilt(channel: str, uids: list[str]) -> None:
        nonlocal left
        if left:
            left -= 1
            raise error

    elsewhere.spoilt = spoilt
    await sent(await put(outbox, "train", "t"))
    assert (left, lost) == (0, [])
    assert len(pool.trajectory("t")) == 1
