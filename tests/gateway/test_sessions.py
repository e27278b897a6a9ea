"""Sessions are read from the pool once, however many calls wait for one, and whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest

from headrace import DataPool, Step
from headrace.gateway.sessions import Session, Sessions
from headrace.pool.calls import AsyncPool
from headrace.pool.errors import NotFound


class SlowPool:
    """A pool that knows no trajectory, and says so once `answer` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer = asyncio.Event()

    async def trajectory(self, uid: str) -> Any:
        self.asked += 1
        await self.answer.wait()
        raise NotFound(f"no trajectory {uid!r}")


async def flushed(uid: str) -> None:
    """Nothing waits for the pool."""


def sessions_on(pool: SlowPool) -> Sessions:
    return Sessions(cast(AsyncPool, pool), flushed, most_tokens=1_000, open_unknown=False)


async def test_a_failed_load_whose_callers_have_left_is_not_logged() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    pool = SlowPool()
    sessions = sessions_on(pool)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sessions.find("t"), 0.01)
    assert pool.asked == 1
    pool.answer.set()
    for _ in range(3):  # the pool's answer, the end of the load, its callback
        await asyncio.sleep(0)
    gc.collect()
    assert logged == []


async def test_a_caller_that_leaves_takes_the_load_from_nobody() -> None:
    pool = SlowPool()
    sessions = sessions_on(pool)
    leaves, stays = (asyncio.create_task(sessions.find("t")) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    pool.answer.set()
    with pytest.raises(NotFound):
        await stays
    assert pool.asked == 1
    with pytest.raises(NotFound):  # and a later call asks anew
        await sessions.find("t")
    assert pool.asked == 2


async def test_what_is_read_anew_counts_only_where_it_is_kept(pool: DataPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "read", lambda session, steps: setattr(session, "tokens", 10 * len(list(steps))))
    sessions = Sessions(pool.aio, flushed, most_tokens=1_000, open_unknown=False)
    counted = []
    for index in range(3):
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", step_index=index)])
        if index == 0:
            session = await sessions.find("t")
        elif index == 2:
            sessions.drop("t")  # while a call of it is under way
        await sessions.refresh(session)
        counted.append((session.tokens, sessions.tokens))
    assert counted == [(10, 10), (20, 20), (30, 0)]
