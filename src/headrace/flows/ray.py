"""Rollouts on the nodes of a Ray cluster: the rollouter says what is played, and worker actors play it.

The rollouter stays one process, with its schedule and its place in the data; a worker keeps nothing. Ray restarts one
that dies, on another node where its own is gone. What it was playing is raised as `WorkerLost`: the rollouter fails the
trajectory at the gateway and plays its next attempt elsewhere, so that even a worker which only seemed to be gone can
add nothing to it. A call is never sent twice by itself (`max_task_retries` is 0), for the same reason.

Every node must see the folder of the agent's files at the same path, and reach the gateway at its address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import ray
import ray.exceptions as rayerr

from headrace.data.errors import HeadraceError
from headrace.flows.config import AgentConfig
from headrace.flows.flow import AgentFailed, AgentFlowBase, WorkerLost
from headrace.flows.gateway_client import GatewayClient, GatewayRefused, TrajectoryEnded
from headrace.flows.rollout_config import RolloutConfig
from headrace.flows.task import Task
from headrace.net.http_answer import NoAnswer
from headrace.net.ray_cluster import LOST_ANSWERS, cause_of, is_lost, join_cluster
from headrace.net.ray_placement import DEAD_ANSWERS

log = logging.getLogger("headrace.flows")

#: Rollouts that a worker takes at once: more than a rollouter's `concurrency` ever gives it.
MAX_ROLLOUTS = 10_000
#: Seconds that a worker may take to begin, and to import its agent, on a busy machine.
START_S = 600.0
#: Seconds between two questions to a worker that was lost.
LOST_RETRY_S = 0.5
#: Seconds that workers may take to end their agents' processes before they are ended themselves.
CLOSE_S = 30.0


class RolloutOutcome(msgspec.Struct, frozen=True):
    """How a worker's rollout ended; what was raised there is raised here again."""

    kind: Literal["complete", "agent_failed", "ended", "refused", "no_answer", "crashed"]
    detail: str = ""
    reason: str = ""
    output: str = ""
    status: int = 0

    @classmethod
    def of(cls, error: Exception) -> RolloutOutcome:
        """The outcome of a rollout that raised."""
        match error:
            case AgentFailed():
                return cls("agent_failed", error.detail, error.reason, error.output)
            case TrajectoryEnded():
                return cls("ended", str(error), error.refusal, status=error.status)
            case GatewayRefused():
                return cls("refused", str(error), error.refusal, status=error.status)
            case NoAnswer():
                return cls("no_answer", str(error))
        return cls("crashed", f"{type(error).__name__}: {error}")

    def settle(self) -> None:
        """Raises what the rollout raised; nothing where it is complete."""
        match self.kind:
            case "agent_failed":
                raise AgentFailed(self.reason, self.detail, self.output)
            case "ended":
                raise TrajectoryEnded(self.detail, self.status, self.reason)
            case "refused":
                raise GatewayRefused(self.detail, self.status, self.reason)
            case "no_answer":
                raise NoAnswer(self.detail)
            case "crashed":
                raise AgentFailed("crashed", self.detail)


class RolloutWorker:
    """The actor's body: a flow and its gateway's client."""

    def __init__(self, agent: dict[str, Any], base: str, address: str, key: str | None, reward_key: str | None) -> None:
        self._agent, self._base = AgentConfig.model_validate(agent), Path(base)
        self._gateway = (address, key, reward_key)
        self._made: tuple[GatewayClient, AgentFlowBase] | None = None

    async def ready(self) -> str:
        """Imports the agent; returns the node that it is on. Raises `InvalidInput` where it cannot."""
        self._flow()
        return str(ray.get_runtime_context().get_node_id())

    async def play(self, task: Task) -> RolloutOutcome:
        """Plays a rollout to its end."""
        try:
            await self._flow().run(task)
        except Exception as error:
            return RolloutOutcome.of(error)
        return RolloutOutcome("complete")

    async def close(self) -> None:
        """Ends what agents were started in."""
        if self._made is not None:
            client, flow = self._made
            await flow.aclose()
            await client.aclose()

    def _flow(self) -> AgentFlowBase:
        if self._made is None:
            client = GatewayClient(*self._gateway)
            self._made = client, self._agent.made(client, self._base)
        return self._made[1]


class _Worker:
    """A worker as the rollouter sees it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.playing = 0
        #: What waits for it to come back, while it is lost.
        self.returning: asyncio.Task[None] | None = None


class RayFlow:
    """Has rollouts played by workers, each by the one that plays the fewest. While all are lost, rollouts wait.

    `begin` makes a worker's actor. One that is dead for good, since Ray was told to restart it so many times and no
    more, is replaced by another.
    """

    def __init__(self, begin: Callable[[], Any], workers: Sequence[Any]) -> None:
        self._begin = begin
        self._workers = [_Worker(handle) for handle in workers]
        self._back = asyncio.Condition()

    @classmethod
    def begun(cls, config: RolloutConfig, address: str, base: Path) -> RayFlow:
        """Joins the cluster and returns once the workers have imported the agent. `address` is the gateway's, and
        `base` the folder that the agent's files are below. They end with this process. Raises `InvalidInput` where no
        node is as the configuration says, `ClusterUnreachable`, and `HeadraceError` where a worker cannot begin."""
        given = config.workers
        assert given is not None
        join_cluster(given.ray, given.namespace)
        options = given.placement.options(default_cpus=1)
        agent = config.agent.model_dump(mode="json", exclude_defaults=True)

        def begin() -> Any:
            join_cluster(given.ray, given.namespace)  # again, where a session of Ray's client ended
            actor = ray.remote(RolloutWorker).options(max_concurrency=MAX_ROLLOUTS, max_task_retries=0, **options)
            return actor.remote(agent, str(base), address, *config.gateway.keys())

        workers = [begin() for _ in range(given.count)]
        try:
            ray.get([worker.ready.remote() for worker in workers], timeout=START_S)
        except rayerr.RayError as error:
            for worker in workers:
                ray.kill(worker)
            raise HeadraceError(f"a rollout worker did not begin: {cause_of(error)}") from error
        return cls(begin, workers)

    async def run(self, task: Task) -> None:
        """Plays a rollout; raises what `AgentFlowBase.run` does, and `WorkerLost` where the worker died under it."""
        worker = await self._free()
        worker.playing += 1
        try:
            sent = worker.handle.play.remote(task)
            try:
                outcome: RolloutOutcome = await sent
            except asyncio.CancelledError:
                ray.cancel(sent)
                raise
        except Exception as error:
            if not is_lost(error):
                raise
            self._lost(worker)
            raise WorkerLost(f"the worker that played it died: {cause_of(error)}") from None
        finally:
            worker.playing -= 1
        outcome.settle()

    async def aclose(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            if worker.returning is not None:
                worker.returning.cancel()
        closing = [worker.handle.close.remote() for worker in self._workers if worker.returning is None]
        if closing:
            await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=CLOSE_S)
        for worker in self._workers:
            ray.kill(worker.handle, no_restart=True)

    async def _free(self) -> _Worker:
        async with self._back:
            await self._back.wait_for(lambda: any(worker.returning is None for worker in self._workers))
        there = [worker for worker in self._workers if worker.returning is None]
        return min(there, key=lambda worker: worker.playing)

    def _lost(self, worker: _Worker) -> None:
        if worker.returning is None:
            log.warning("a rollout worker is lost; Ray restarts it, and its rollouts are played elsewhere")
            worker.returning = asyncio.create_task(self._return(worker))

    async def _return(self, worker: _Worker) -> None:
        """Waits until a worker answers again."""
        dead, node = 0, None
        while node is None:
            try:
                node = await worker.handle.ready.remote()
                continue
            except rayerr.ActorUnavailableError:
                dead = 0
            except LOST_ANSWERS:
                dead += 1
                if dead == DEAD_ANSWERS:
                    dead = 0
                    await self._replace(worker)
            except rayerr.RayError as error:
                log.warning("a rollout worker could not begin again: %s", cause_of(error))
            except Exception as error:
                if not is_lost(error):
                    raise
                await self._replace(worker)  # its session ended, and it with that
            await asyncio.sleep(LOST_RETRY_S)
        log.warning("the rollout worker is back, on node %s", node)
        async with self._back:
            worker.returning = None
            self._back.notify_all()

    async def _replace(self, worker: _Worker) -> None:
        """Begins another actor in a worker's place; where the cluster is away it keeps the one that it has."""
        try:
            worker.handle = await asyncio.to_thread(self._begin)
        except HeadraceError as error:
            log.warning("a rollout worker could not begin again: %s", error)
