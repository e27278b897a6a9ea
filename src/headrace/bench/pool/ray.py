"""`ray_vs_naive`: steps through Ray, packed and in batches, against one call a step.

One producer submits 64 standard steps a call to the pool's actor, which has a journal and answers once they are on the
disk. The other side is what one writes first: an actor that appends to a list, and one awaited call for every step,
with its ids and log-probs as lists, made before the clock starts. Both live in a local cluster of their own, which a
child process starts and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from headrace.bench.pool.load import PoolSizes, StepSource
from headrace.bench.report import Figures
from headrace.bench.timing import in_own_process, in_turn, median, seconds
from headrace.data.step import Step
from headrace.pool.connect import connect
from headrace.pool.ray import start_pool, stop_pool

NAME, NAMESPACE = "bench_pool", "headrace-bench"


class BareActor:
    """An actor that holds a list."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def append(self, step: Any) -> None:
        self.steps.append(step)


@contextmanager
def local_cluster_pool(journal: Path | None = None) -> Iterator[str]:
    """A Ray cluster with the pool's actor, `NAME` in `NAMESPACE`, until the block ends; gives the cluster's address."""
    started = ray.init(
        "local", namespace=NAMESPACE, num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        start_pool(NAME, namespace=NAMESPACE, journal=journal)
        try:
            yield started.address_info["gcs_address"]
        finally:
            stop_pool(NAME, namespace=NAMESPACE)
    finally:
        ray.shutdown()


def through_ray(sizes: PoolSizes, folder: Path) -> Figures:
    """The figures of this module, measured in a child process of its own."""
    return in_own_process(in_own_cluster, sizes, folder)


def in_own_cluster(sizes: PoolSizes, folder: Path) -> Figures:
    """The same, in the child."""
    load = StepSource(sizes)
    with local_cluster_pool(folder / "journal"), connect(f"ray-actor://{NAME}?namespace={NAMESPACE}") as pool:
        bare = ray.remote(BareActor).remote()

        def packed() -> float:
            work = load.submits(sizes.ray_submits)
            return seconds(lambda: [pool.submit_steps(steps) for steps in work])

        def naive() -> float:
            steps = [_as_lists(step) for step in load.steps(sizes.naive_calls)]
            return asyncio.run(_one_by_one(bare, steps))

        packed_s, naive_s = map(median, in_turn(packed, naive, sizes.ray_rounds))
    packed_rate = sizes.ray_submits * sizes.submit / packed_s
    naive_rate = sizes.naive_calls / naive_s
    return Figures(
        {"ray_vs_naive": packed_rate / naive_rate},
        {"ray_steps_per_s": packed_rate, "naive_ray_steps_per_s": naive_rate},
    )


async def _one_by_one(actor: Any, steps: list[dict[str, Any]]) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    for step in steps:
        await actor.append.remote(step)
    return loop.time() - start


def _as_lists(step: Step) -> dict[str, Any]:
    given = {"trajectory_uid": step.trajectory_uid, "prompt_uid": step.prompt_uid, "step_index": 0, "is_last": True}
    arrays = ("prompt_ids", "response_ids", "rollout_log_probs")
    return {**given, "reward": step.reward, **{name: getattr(step, name).tolist() for name in arrays}}
