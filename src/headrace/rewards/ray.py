"""A reward worker as a named, detached Ray actor, and the worker that reaches it from elsewhere in the cluster.

The actor scores whatever it is sent, and, where it is told of a pool, runs the reward loop on it too. Ray restarts it
when it dies, on another node where its own is gone; it keeps nothing that it could not ask the pool for. A restart
begins from what the actor was started with: the reward's configuration, the folder that its files are below (which
every node must see where the reward has files of its own), the pool's address, the tokenizer's folder.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
import ray.exceptions as rayerr

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.net.ray_cluster import LOST_ANSWERS, ActorAddress, cause_of, join_cluster, named_actor
from headrace.net.ray_placement import Placement
from headrace.net.supervised import Supervised
from headrace.pool.connect import connect
from headrace.rewards.config import RewardConfig
from headrace.rewards.loop import PATIENCE_S, RewardLoop
from headrace.rewards.recorded import SampleReader
from headrace.rewards.sample import Reason, RewardFailure, Sample, Score
from headrace.rewards.source import Outcome
from headrace.rewards.worker import LocalRewardWorker
from headrace.tokens import do_without_torch, load_renderer

#: How often Ray sends a call again that its actor died under. Scoring twice does no harm, and a sample that kills its
#: actor must not do so for ever.
CALL_RETRIES = 3
#: Calls that the actor takes at once; what it scores at once is the reward's own `concurrency`.
MAX_CALLS = 10_000
#: Seconds that an actor may take to load its reward, and its tokenizer, before it counts as not started.
START_S = 600.0
#: Seconds that an actor may take to let go of its connections before it is ended.
CLOSE_S = 30.0
#: Seconds for which a name is waited for that an actor has whose owner just ended.
NAME_S = 60.0

T = TypeVar("T")


class WatchedPool(msgspec.Struct, frozen=True):
    """The pool that an actor's reward loop scores: its address and key, the channels, and the model's tokenizer."""

    address: str
    channels: tuple[str, ...]
    tokenizer_path: str
    key: str | None = None
    patience_s: float = PATIENCE_S


class RewardLoopWorker:
    """The actor's body."""

    def __init__(self, reward: dict[str, Any], base: str, watched: WatchedPool | None) -> None:
        config = RewardConfig.of(reward, Path(base))
        self._tasks = _Background()
        self._worker = LocalRewardWorker(config)
        self._tasks.call(self._worker.ready()).result()
        self._ground_truth = config.ground_truth
        self._loop: Supervised | None = None
        self._told: Callable[[], dict[str, Any]] = dict
        if watched is not None:
            do_without_torch()  # functions of users run in processes of their own, which may have it
            self._tasks.call(self._watch(watched, config)).result()

    async def score(self, samples: list[Sample]) -> list[Score | tuple[str, Reason, str, bool]]:
        """A score for each sample, or the fields of its failure."""
        known = [self._with_truth(sample) for sample in samples]
        whole = [sample for sample in known if isinstance(sample, Sample)]
        scored = iter(await asyncio.wrap_future(self._tasks.call(self._worker.score(whole))))
        found = [next(scored) if isinstance(each, Sample) else each for each in known]
        return [
            (each.detail, each.reason, each.source, each.again) if isinstance(each, RewardFailure) else each
            for each in found
        ]

    def _with_truth(self, sample: Sample) -> Sample | RewardFailure:
        """A sample with the ground truth of the reward's column; its failure where its row has no such column."""
        try:
            return sample.with_truth(self._ground_truth)
        except InvalidInput as error:
            return RewardFailure(str(error), again=False)

    async def state(self) -> dict[str, Any]:
        """What the loop has counted so far, and its process."""
        return {"process_id": os.getpid(), "loop": self._told(), "trouble": self._loop and self._loop.trouble}

    async def close(self) -> None:
        """Ends the loop and lets go of connections: the last call before the actor is killed for good."""
        await asyncio.wrap_future(self._tasks.call(self._close()))

    async def _watch(self, watched: WatchedPool, config: RewardConfig) -> None:
        reader = SampleReader(load_renderer(watched.tokenizer_path), config.ground_truth)
        pool = connect(watched.address, key=watched.key)
        loop = RewardLoop(
            pool,
            self._worker,
            reader,
            channels=watched.channels,
            on=config.on,
            concurrency=config.concurrency,
            patience_s=watched.patience_s,
        )
        self._told = loop.told
        self._loop = Supervised("the reward loop", loop.run)
        self._loop.start()

    async def _close(self) -> None:
        if self._loop is not None:
            await self._loop.stop()
        await self._worker.aclose()


class _Background:
    """An event loop in a thread of its own, where an actor's work begins with the actor and not with its first call."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="headrace-rewards", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class RayRewardWorker:
    """Scores by a named actor. Where it is away, its samples fail as `unavailable`, and the next ones look for it
    again."""

    def __init__(self, where: ActorAddress) -> None:
        self.where = where
        self._handle: Any = None

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """A score or a failure for each sample."""
        try:
            if self._handle is None:
                self._handle = await asyncio.to_thread(self.where.handle)
            if self._handle is None:
                return self._away(samples, f"no actor {self.where.name!r} in namespace {self.where.namespace!r}")
            found = await self._handle.score.remote(list(samples))
        except LOST_ANSWERS as error:
            self._handle = None
            return self._away(samples, cause_of(error))
        except HeadraceError as error:
            return self._away(samples, str(error))
        except rayerr.RayError as error:
            return [RewardFailure(cause_of(error), source=self.where.name) for _ in samples]
        return [RewardFailure(*each[:3], again=each[3]) if isinstance(each, tuple) else each for each in found]

    def _away(self, samples: Sequence[Sample], why: str) -> list[Outcome]:
        return [RewardFailure(why, "unavailable", self.where.name) for _ in samples]

    async def aclose(self) -> None:
        """The actor and the cluster's connection stay: others in this process may use them."""


def start_reward_worker(
    where: ActorAddress,
    config: dict[str, Any],
    base: Path,
    *,
    watched: WatchedPool | None = None,
    placement: Placement | None = None,
    attached: bool = False,
) -> Any:
    """Starts the actor and returns its handle once its reward is loaded, and its loop begun.

    `config` is what a reward's file holds, and `base` the folder that its files are below. The actor is detached, or
    `attached`: it ends with this process, and takes the name of one whose process just ended. Raises `InvalidInput`
    where an actor of that name runs, or no node is as the `placement` says, `HeadraceError` where it cannot start.
    """
    join_cluster(where.cluster, where.namespace)
    actor = ray.remote(RewardLoopWorker).options(
        name=where.name,
        namespace=where.namespace,
        max_task_retries=CALL_RETRIES,
        max_concurrency=MAX_CALLS,
        **({} if attached else {"lifetime": "detached"}),
        **(placement or Placement()).options(default_cpus=1),
    )
    handle = named_actor(
        lambda: actor.remote(config, str(base), watched),
        where.name,
        where.namespace,
        wait_s=NAME_S if attached else 0.0,
    )
    try:
        ray.get(handle.state.remote(), timeout=START_S)
    except rayerr.RayError as error:
        ray.kill(handle)
        raise HeadraceError(f"the reward worker {where.name!r} did not start: {cause_of(error)}") from error
    return handle


def stop_reward_worker(where: ActorAddress) -> bool:
    """Ends the actor for good; false where there is none."""
    handle = where.handle()
    if handle is None:
        return False
    try:
        ray.get(handle.close.remote(), timeout=CLOSE_S)
    except rayerr.RayError:
        pass  # it is going either way, and keeps nothing
    ray.kill(handle, no_restart=True)
    return True
