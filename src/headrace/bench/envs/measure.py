"""`headrace bench envs`: an environment's machinery, compared with the same rollouts without it.

The rollouts are timed three ways: under a bare semaphore, through `serve`, and through `process`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.bench.report import Bar, BenchReport, Figures
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import in_turn, median
from headrace.envs import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem
from headrace.envs.process import process

BARS = {
    "overhead_vs_gather": Bar(
        "rollouts of 20 ms, 32 at a time, through serve to the last acknowledgement, over a bare semaphore", at_most=1.3
    ),
    "process_parallel": Bar("the same through process, to the last line of its file", at_most=1.3),
}


def measure(quick: bool = False) -> BenchReport:
    """All figures of environments; with `quick` at a smaller size."""
    return measure_load(QUICK if quick else FULL)


def measure_load(load: RolloutLoad) -> BenchReport:
    """The figures at this load."""
    report = BenchReport("envs", BARS, details={"load": asdict(load)})
    with ServerProcess("headrace.bench.envs.stub") as api:
        address = api.address
        serve_s, bare_s = map(median, in_turn(lambda: served(load, address), lambda: gathered(load), load.rounds))
    report.add(
        Figures(
            {"overhead_vs_gather": serve_s / bare_s},
            {"serve_rollouts_s": load.rollouts / serve_s, "gather_rollouts_s": load.rollouts / bare_s},
        )
    )
    process_s, bare_s = map(median, in_turn(lambda: processed(load), lambda: gathered(load), load.rounds))
    report.add(Figures({"process_parallel": process_s / bare_s}, {"process_rollouts_s": load.rollouts / process_s}))
    return report


#: A server that is never asked: a rollout only takes its time.
SERVER = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="none", api_key="x", health_check=False)
TOKENS = 256


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """`rollouts` of `rollout_s` each, `concurrency` at a time, in groups of `group_size`."""

    rollouts: int
    rounds: int
    rollout_s: float = 0.02
    concurrency: int = 32
    group_size: int = 4

    @property
    def groups(self) -> int:
        return self.rollouts // self.group_size


FULL = RolloutLoad(rollouts=2048, rounds=5)
QUICK = RolloutLoad(rollouts=512, rounds=3)


async def rollout(load: RolloutLoad, number: int) -> ScoredDataItem:
    """One rollout: sleeps for as long as a model would take, and returns tokens of a usual number."""
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
    """Makes the load's groups and stops. `begun` is the start of its first rollout, `ended` when its last group was
    handed over."""

    name = "bench"

    def __init__(self, load: RolloutLoad, **fields: Any) -> None:
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


def gathered(load: RolloutLoad) -> float:
    """Seconds that the rollouts take under a bare semaphore."""

    async def run() -> float:
        places = asyncio.Semaphore(load.concurrency)

        async def one(number: int) -> None:
            async with places:
                await rollout(load, number)

        begun = time.perf_counter()
        await asyncio.gather(*map(one, range(load.rollouts)))
        return time.perf_counter() - begun

    return asyncio.run(run())


class ServedEnv(BenchEnv):
    """Run by `serve`."""

    async def disconnect_env(self) -> None:
        """Notes the time: it is called when the last group was acknowledged."""
        self.ended = time.perf_counter()
        await super().disconnect_env()


def served(load: RolloutLoad, address: str) -> float:
    """Seconds from the start of the first rollout to the last acknowledgement."""

    async def run() -> float:
        env = ServedEnv(load, rollout_server_url=address)
        await env.env_manager()
        _all_made(env, load)
        return env.ended - env.begun

    return asyncio.run(run())


class ProcessedEnv(BenchEnv):
    """Run by `process`."""

    async def close(self) -> None:
        """Notes the time: it is called when the last group was written."""
        self.ended = time.perf_counter()
        await super().close()


def processed(load: RolloutLoad) -> float:
    """Seconds from the start of the first rollout to the last line of the file."""

    async def run(folder: str) -> float:
        env = ProcessedEnv(load, data_path_to_save_groups=str(Path(folder) / "groups.jsonl"))
        await process(env, load.groups)
        _all_made(env, load)
        return env.ended - env.begun

    with TemporaryDirectory(prefix="headrace-bench-") as folder:
        return asyncio.run(run(folder))


def _all_made(env: BenchEnv, load: RolloutLoad) -> None:
    if env.counts.groups != load.groups or env.counts.failed:
        raise RuntimeError(f"{env.counts.groups} of {load.groups} groups came through: {env.counts}")
