"""The rollouts that are measured, and the environment that makes them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from headrace.envs import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem

#: A server that is never asked: a rollout only takes its time.
SERVER = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="x", health_check=False)
TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """`rollouts` of `rollout_s` each, `concurrency` at a time, in groups of `group_size`; sides measured in turn."""

    rollouts: int
    rounds: int
    rollout_s: float = 0.02
    concurrency: int = 32
    group_size: int = 4

    @property
    def groups(self) -> int:
        return self.rollouts // self.group_size


FULL = Load(rollouts=2048, rounds=5)
QUICK = Load(rollouts=512, rounds=3)


async def rollout(load: Load, number: int) -> ScoredDataItem:
    """One rollout: it waits as if for a model, and has tokens as if of one."""
    await asyncio.sleep(load.rollout_s)
    tokens = [number % 1000, *range(1, TOKENS)]
    return {
        "tokens": tokens,
        "masks": [-100] * (TOKENS // 2) + tokens[TOKENS // 2 :],
        "scores": float(number % 2),
        "inference_logprobs": [1.0] * (TOKENS // 2) + [-0.5] * (TOKENS // 2),
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}],
    }


class BenchEnv(BaseEnv):
    """Makes the load's groups and stops. `begun` is its first rollout's start, `ended` a side's end."""

    name = "bench"

    def __init__(self, load: Load, **fields: Any) -> None:
        workers = load.concurrency // load.group_size
        config = BaseEnvConfig(group_size=load.group_size, max_num_workers=workers, use_wandb=False, **fields)
        super().__init__(config, [SERVER])
        self._load = load
        self._items = iter(range(load.groups))
        self._made = 0
        self.begun = self.ended = 0.0

    async def setup(self) -> None:
        return

    async def get_next_item(self) -> int | None:
        item = next(self._items, None)
        if item is None and self.manager is not None and not self.manager.stop.asked.is_set():
            self.manager.stop.request()
        return item

    async def collect_trajectory(self, item: int) -> tuple[ScoredDataItem, list[Any]]:
        self.begun = self.begun or time.perf_counter()
        self._made += 1
        return await rollout(self._load, self._made), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return
