"""The pool as a named, detached Ray actor, and the client's transport to it.

The actor is an embedded pool that answers frames (`call`) and, for those who hold a bare handle, plain calls. Ray
restarts it when it dies; it then recovers from its journal. A journal in a local folder lives on one node, so the actor
is pinned to the node where it was started: restarted elsewhere it would find an empty folder and call that the truth.
On a path that every node sees (`shared_journal`), it may move; the journal's lock still admits one process only, and an
actor that Ray restarts waits for it: the process before may end a little later than its node is given up.

How the cluster is joined, with its token, is `net/ray_cluster.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import ray
import ray.exceptions as rayerr
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headrace.data.errors import InvalidInput
from headrace.data.step import Step
from headrace.net.ray_cluster import DEFAULT_NAMESPACE as DEFAULT_NAMESPACE
from headrace.net.ray_cluster import (
    ActorAddress,
    ClusterUnreachable,
    cause_of,
    is_lost,
    join_cluster,
    named_actor,
)
from headrace.net.ray_placement import Placement
from headrace.pool.batch import Batch
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalLocked, NotFound, PoolUnreachable
from headrace.pool.operation import Receipt
from headrace.pool.remote import Unreachable
from headrace.pool.service import answer

#: Calls that go to the actor in one, at most.
MAX_CALLS_TOGETHER = 64
#: Seconds for which an actor waits for a journal that another process has: the one before it, which notices only that
#: its node is gone, or a file server's lease of a lock, which lasts a minute or two.
LOCK_S = 180.0
#: Seconds between two tries.
LOCK_RETRY_S = 0.2
#: Seconds for which a name is waited for that an actor has whose owner just ended.
NAME_S = 60.0


def actor_address(name: str, address: str = "auto", namespace: str = DEFAULT_NAMESPACE) -> str:
    """A named actor as `connect` takes it."""
    return str(ActorAddress(name, namespace, address))


class PoolActor:
    """The actor's body. Its plain calls take what the seed's trainers and gateways pass: Steps, dicts, lists."""

    def __init__(self, options: dict[str, Any], lock_s: float = 0.0) -> None:
        """`options` are `DataPool`'s; a journal that another process has is waited for `lock_s`, or, where Ray has
        restarted the actor, `LOCK_S`."""
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._pool = _recovered(options, LOCK_S if restarted else lock_s)

    async def call(self, body: bytes) -> bytes:
        data, _ = await answer(self._pool, body)
        return data

    async def call_many(self, bodies: list[bytes]) -> list[bytes]:
        """Several calls in one: an actor call costs more than what most of them do."""
        return await asyncio.gather(*map(self.call, bodies))

    async def submit_step(self, step: Step | dict[str, Any], channel: str = DEFAULT_CHANNEL) -> Receipt:
        return await self._pool.aio.submit_step(step, channel)

    async def submit_steps(self, steps: list[Step | dict[str, Any]], channel: str = DEFAULT_CHANNEL) -> Receipt:
        return await self._pool.aio.submit_steps(steps, channel)

    async def fetch_batch(
        self,
        batch_size: int,
        n_rollouts: int | None = None,
        channel: str = DEFAULT_CHANNEL,
        timeout: float | None = 0,
        **options: Any,
    ) -> Batch | None:
        """Polls by default: a caller that stopped waiting for a blocked call would lose what it takes later."""
        return await self._pool.aio.fetch_batch(batch_size, n_rollouts, channel, timeout=timeout, **options)

    async def complete_trajectory(
        self, trajectory_uid: str, reward: float | None = None, channel: str | None = DEFAULT_CHANNEL
    ) -> bool:
        return await self._pool.aio.complete_trajectory(trajectory_uid, reward, channel)

    async def get_statistics(self, channel: str = DEFAULT_CHANNEL) -> dict[str, Any]:
        return await self._pool.aio.stats(channel)

    async def shutdown(self, channel: str | None = None) -> None:
        """Ends a channel, or all; the actor goes on, so that what is left can be fetched."""
        await self._pool.aio.shutdown(channel)

    async def process_id(self) -> int:
        return os.getpid()

    async def close(self) -> None:
        """Lets go of the journal: the last call before the actor is killed for good."""
        self._pool.close()


def _recovered(options: dict[str, Any], lock_s: float) -> DataPool:
    give_up = time.monotonic() + lock_s
    while True:
        try:
            return DataPool(**options)
        except JournalLocked:
            if time.monotonic() >= give_up:
                raise
            time.sleep(LOCK_RETRY_S)


def start_pool(
    name: str,
    *,
    address: str = "auto",
    namespace: str = DEFAULT_NAMESPACE,
    journal: str | os.PathLike[str] | None = None,
    shared_journal: bool = False,
    placement: Placement | None = None,
    attached: bool = False,
    **options: Any,
) -> Any:
    """Starts the actor and returns its handle once it has recovered; `options` are `DataPool`'s.

    It is detached, or `attached`: it ends with this process, and takes the name and the journal of one whose process
    just ended. A `placement` that says where it may be needs a `shared_journal`, where there is a journal. Raises
    `InvalidInput` and `PoolUnreachable`.
    """
    given = placement or Placement()
    if journal is not None and not shared_journal and (given.resources or given.node is not None or given.spread):
        raise InvalidInput(
            "the journal lies on this node, and the pool stays with it; give --shared-journal where every node sees "
            "that folder, or leave out where to place the pool"
        )
    try:
        join_cluster(address, namespace)
    except ClusterUnreachable as error:
        raise PoolUnreachable(str(error)) from error
    placed = given.options(default_cpus=0)
    if journal is not None:
        options["journal"] = str(Path(journal).absolute())
        if not shared_journal:
            node = ray.get_runtime_context().get_node_id()
            placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(PoolActor).options(
        name=name,
        namespace=namespace,
        max_concurrency=10_000,
        **({} if attached else {"lifetime": "detached"}),
        **placed,
    )
    handle = named_actor(
        lambda: actor.remote(options, LOCK_S if attached else 0.0), name, namespace, wait_s=NAME_S if attached else 0.0
    )
    try:
        ray.get(handle.get_statistics.remote())
    except rayerr.RayError as error:
        ray.kill(handle)
        raise PoolUnreachable(f"the pool {name!r} did not start: {cause_of(error)}") from error
    return handle


def stop_pool(name: str, *, address: str = "auto", namespace: str = DEFAULT_NAMESPACE) -> None:
    """Ends the actor for good; its journal stays."""
    handle = find_pool(ActorAddress(name, namespace, address))
    try:
        ray.get(handle.close.remote(), timeout=30)
    except rayerr.RayError:
        pass  # it is going either way; recovery copes with a journal that was not closed
    ray.kill(handle, no_restart=True)


def find_pool(where: ActorAddress) -> Any:
    """The handle of a pool's actor. Raises `NotFound` where there is none, `PoolUnreachable` where there is no
    cluster."""
    try:
        found = where.handle()
    except ClusterUnreachable as error:
        raise PoolUnreachable(str(error)) from error
    if found is None:
        raise NotFound(
            f"no actor {where.name!r} in namespace {where.namespace!r}; "
            f"start it with `headrace pool start --name {where.name} --namespace {where.namespace}`"
        )
    return found


class _Gathering:
    """Calls of one event loop on their way to the actor: while some are under way, the next ones gather."""

    def __init__(self, actor: FoundActor) -> None:
        self._actor = actor
        self._next: list[tuple[bytes, asyncio.Future[bytes]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def call(self, body: bytes, timeout: float) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._next.append((body, answer))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError as error:
            raise Unreachable(f"no answer within {timeout:g} s") from error

    async def _send(self) -> None:
        try:
            while self._next:
                some, self._next = self._next[:MAX_CALLS_TOGETHER], self._next[MAX_CALLS_TOGETHER:]
                try:
                    actor = await self._actor.found()
                    answers = await actor.call_many.remote([body for body, _ in some])
                except Exception as error:  # any: those who wait must hear of it
                    failed = self._actor.lost(error) if is_lost(error) else error
                    for _, waiting in some:
                        if not waiting.done():
                            waiting.set_exception(failed)
                    continue
                for (_, waiting), answer in zip(some, answers, strict=True):
                    if not waiting.done():
                        waiting.set_result(bytes(answer))
        finally:
            self._sending = None


class FoundActor:
    """The handle of a named pool, looked for again where its actor is dead: another may have its name by then."""

    def __init__(self, where: ActorAddress) -> None:
        self._where = where
        self._handle: Any = find_pool(where)

    def get(self) -> Any:
        """The handle; `Unreachable` where there is none now."""
        if self._handle is None:
            try:
                self._handle = find_pool(self._where)
            except (NotFound, PoolUnreachable) as error:
                raise Unreachable(str(error)) from error
        return self._handle

    async def found(self) -> Any:
        """The same; other tasks go on meanwhile."""
        return self._handle if self._handle is not None else await asyncio.to_thread(self.get)

    def lost(self, error: BaseException) -> Unreachable:
        """What a lost answer is raised as."""
        if not isinstance(error, rayerr.RayError | TimeoutError) or isinstance(error, rayerr.ActorDiedError):
            self._handle = None  # the actor is dead, or the session that the handle belongs to
        return Unreachable(cause_of(error))


class RayTransport:
    """Carries frames in actor calls. `ray-actor://NAME?namespace=default&address=auto`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._actor = FoundActor(ActorAddress.read(address))
        self._gathering: dict[asyncio.AbstractEventLoop, _Gathering] = {}

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        actor = self._actor.get()
        try:
            sent = actor.call.remote(body)
            try:
                return bytes(ray.get(sent, timeout=timeout))
            except KeyboardInterrupt:
                ray.cancel(sent)
                raise
        except Exception as error:
            if is_lost(error):
                raise self._actor.lost(error) from error
            raise

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        if not waits:
            return await self._together().call(body, timeout)
        actor = await self._actor.found()
        try:
            sent = actor.call.remote(body)
            try:
                async with asyncio.timeout(timeout):
                    return bytes(await sent)
            except asyncio.CancelledError:
                ray.cancel(sent)  # nobody takes the answer: a fetch that waits must not take a batch for them
                raise
        except Exception as error:
            if isinstance(error, TimeoutError) or is_lost(error):
                raise self._actor.lost(error) from error
            raise

    def _together(self) -> _Gathering:
        loop = asyncio.get_running_loop()
        found = self._gathering.get(loop)
        if found is None:
            for other in [old for old in self._gathering if old.is_closed()]:
                del self._gathering[other]
            found = self._gathering[loop] = _Gathering(self._actor)
        return found

    def close(self) -> None:
        """The actor and the cluster's connection stay: others in this process may use them."""

    async def aclose(self) -> None:
        self.close()
