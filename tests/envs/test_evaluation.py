"""Evaluations come with the trainer's steps, and training work makes room for them as its mode says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, items_of, running

from headrace.envs import BaseEnvConfig, EvalHandlingEnum


class Evaluated(CountingEnv):
    """Its evaluations last until `finish`; its rollouts until they have a turn."""

    def __init__(self, config: BaseEnvConfig) -> None:
        super().__init__(config)
        self.begun, self.finish = asyncio.Semaphore(0), asyncio.Event()
        self.turns, self.free = asyncio.Semaphore(0), False
        self.error: Exception | None = None

        async def play(item: int) -> None:
            if not self.free:
                await self.turns.acquire()

        self.play = play

    def let(self, rollouts: int) -> None:
        for _ in range(rollouts):
            self.turns.release()

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.begun.release()
        await self.finish.wait()
        if self.error is not None:
            raise self.error


async def polled(api: Api, times: int = 5) -> None:
    """Returns once the environment has looked at the queue so many times more."""
    before = len(api.asked)
    await api.until(lambda: [what for what, _ in api.asked[before:]].count("status") >= times)


@pytest.mark.parametrize(
    ("mode", "started"),
    [(EvalHandlingEnum.STOP_TRAIN, 0), (EvalHandlingEnum.LIMIT_TRAIN, 2), (EvalHandlingEnum.NONE, 4)],
)
async def test_while_it_runs_no_work_is_started_or_half_of_it_or_all(
    api: Api, mode: EvalHandlingEnum, started: int
) -> None:
    env = Evaluated(config(api, steps_per_eval=1, eval_handling=mode))
    async with running(env):
        await api.until(lambda: env.next == 4)
        api.step = 1
        await env.begun.acquire()
        env.let(4 * 2)
        await api.until(lambda: len(api.received) == 4)
        await polled(api)
        assert env.next == 4 + started
        env.finish.set()
        await api.until(lambda: env.next == 8)
        env.let(100)
    assert sorted(items_of(api.received))[:8] == list(range(8))


async def test_one_comes_for_every_mark_that_is_passed_and_none_beside_another(api: Api) -> None:
    env = Evaluated(config(api, steps_per_eval=100, eval_handling="NONE"))
    env.free = True
    async with running(env):
        await polled(api)
        for step in (99, 250, 300):
            api.step = step
            await polled(api)
        env.finish.set()
        await polled(api)
        assert env.counts.evaluations == 1
        api.step = 400
        await api.until(lambda: env.counts.evaluations == 2)


async def test_one_that_raises_is_counted_and_work_goes_on(api: Api) -> None:
    env = Evaluated(config(api, steps_per_eval=1))
    env.error = LookupError("no test set")
    env.finish.set()
    env.free = True
    async with running(env):
        await polled(api)
        api.step = 1
        await api.until(lambda: env.counts.failed["evaluate"] == 1)
        before = len(api.received)
        api.queue.clear()
        await api.until(lambda: len(api.received) > before)


async def test_a_stop_breaks_one_off(api: Api) -> None:
    env = Evaluated(config(api, steps_per_eval=1))
    env.free = True
    async with running(env):
        await polled(api)
        api.step = 1
        await env.begun.acquire()
    assert env.eval_runner is not None
    assert env.eval_runner.cancelled()
    assert api.left == [0]
