"""The load three ways: under a bare semaphore, through `serve`, and through `process`. Each returns its seconds."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.bench.envs.load import BenchEnv, Load, rollout
from headrace.envs.process import process


def gathered(load: Load) -> float:
    """What the rollouts take with nothing around them."""

    async def run() -> float:
        places = asyncio.Semaphore(load.concurrency)

        async def one(number: int) -> None:
            async with places:
                await rollout(load, number)

        begun = time.perf_counter()
        await asyncio.gather(*map(one, range(load.rollouts)))
        return time.perf_counter() - begun

    return asyncio.run(run())


class Served(BenchEnv):
    async def disconnect_env(self) -> None:
        """Comes when the last group was acknowledged."""
        self.ended = time.perf_counter()
        await super().disconnect_env()


def served(load: Load, address: str) -> float:
    """From the first rollout's start to the last acknowledgement."""

    async def run() -> float:
        env = Served(load, rollout_server_url=address)
        await env.env_manager()
        _all_made(env, load)
        return env.ended - env.begun

    return asyncio.run(run())


class Processed(BenchEnv):
    async def close(self) -> None:
        """Comes when the last group was written."""
        self.ended = time.perf_counter()
        await super().close()


def processed(load: Load) -> float:
    """From the first rollout's start to the last line of the file."""

    async def run(folder: str) -> float:
        env = Processed(load, data_path_to_save_groups=str(Path(folder) / "groups.jsonl"))
        await process(env, load.groups)
        _all_made(env, load)
        return env.ended - env.begun

    with TemporaryDirectory(prefix="headrace-bench-") as folder:
        return asyncio.run(run(folder))


def _all_made(env: BenchEnv, load: Load) -> None:
    if env.counts.groups != load.groups or env.counts.failed:
        raise RuntimeError(f"{env.counts.groups} of {load.groups} groups came through: {env.counts}")
