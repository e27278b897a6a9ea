"""A small environment whose rollouts a test decides about, and a run of it beside the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.envs.api import Api

from headrace.envs import APIServerConfig, BaseEnv, BaseEnvConfig

#: A server that no rollout here asks.
SERVER = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="x", health_check=False)


def rollout(item: int, score: float) -> dict[str, Any]:
    return {"tokens": [1, 2, item], "masks": [-100, 2, item], "scores": score, "messages": []}


class CountingEnv(BaseEnv):
    """Items are 0, 1, 2, ... up to `most`. Every other rollout of a group scores one. A rollout awaits `play`."""

    name = "counting"

    def __init__(
        self, config: BaseEnvConfig, most: int | None = None, servers: Sequence[APIServerConfig] = (SERVER,)
    ) -> None:
        super().__init__(config, servers)
        self.most = most
        self.next = 0
        self.made: dict[int, int] = {}
        self.play: Callable[[int], Awaitable[Any]] = lambda item: asyncio.sleep(0)

    async def setup(self) -> None:
        self.ready = True

    async def get_next_item(self) -> int | None:
        if self.most is not None and self.next >= self.most:
            return None
        self.next += 1
        return self.next - 1

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        number = self.made[item] = self.made.get(item, 0) + 1
        found = await self.play(item)
        return rollout(item, number % 2) if found is None else found, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def config(api: Api, **fields: Any) -> BaseEnvConfig:
    given = {"group_size": 2, "max_num_workers": 4, "status_poll_s": 0.01, "total_steps": 1000, "use_wandb": False}
    return BaseEnvConfig(rollout_server_url=api.address, **{**given, **fields})


def items_of(groups: list[dict[str, Any]]) -> list[int]:
    return [group["tokens"][0][-1] for group in groups]


@asynccontextmanager
async def running(env: BaseEnv) -> AsyncIterator[asyncio.Task[None]]:
    """The environment at work; told to stop, and waited for, at the end."""
    task = asyncio.create_task(env.env_manager())
    try:
        yield task
    finally:
        if not task.done() and env.manager is not None:
            env.manager.stop.request()
        await task
