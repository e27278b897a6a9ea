"""What all simulated clients share: the world that they are in, and how they call the pool: with its real client, whose
retries are bounded, and again and again beyond that, since everything that they ask may be asked again."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.data.json import to_json
from headrace.pool.errors import JournalError, LeaseLost, PoolClosed, PoolFull, PoolUnreachable
from headrace.pool.frame_transport import FrameTransport
from headrace.pool.operation import Operation
from headrace.pool.remote import RemotePool, Transport
from headrace.storm.log import SUFFIX, Event
from headrace.storm.simulation.machine import Machine
from headrace.storm.simulation.network import Network, SimulatedTransport
from headrace.storm.simulation.scheduler import SimulatedScheduler
from headrace.storm.simulation.streams import Streams

#: Seconds for which the pool's client tries a pool that does not answer, before it says so.
RETRY_S = 5.0
#: Seconds until what the pool could not do as it was, or had no room for, is asked again, at most.
AGAIN_S, FULL_AGAIN_S = 0.5, 8.0
#: Seconds that anything may take.
PATIENCE_S = 900.0
#: Seconds until a client that was killed is back, on average.
BACK_S = 2.0


class SimulationLog:
    """The events of a simulation, as the storm's processes log theirs: `t` is the simulated time in nanoseconds."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._last = 0
        self._digest = hashlib.sha256()
        self._lines: list[bytes] = []

    def time(self) -> int:
        """A time of its own for whoever asks: no two are the same."""
        self._last = max(self._last + 1, int(self._scheduler.now * 1e9))
        return self._last

    def write(self, who: str, event: str, **fields: Any) -> None:
        record = {"t": self.time(), "who": who, "e": event, **fields}
        self.events.append(record)
        line = to_json(record) + b"\n"
        self._digest.update(line)
        self._lines.append(line)

    @property
    def digest(self) -> str:
        """The same for logs that are the same, byte for byte."""
        return self._digest.hexdigest()

    def save(self, folder: Path) -> Path:
        """Writes the log as a storm's: `headrace storm --check FOLDER` reads it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"simulation{SUFFIX}"
        path.write_bytes(b"".join(self._lines))
        return path


class World:
    """What clients know of each other: the network, the log, and whether it is time to end."""

    def __init__(self, machine: Machine, network: Network, log: SimulationLog, seed: int) -> None:
        self.machine, self.network, self.log, self.seed = machine, network, log, seed
        self.stopping = False  # no agent begins anything new
        self.trajectories: dict[str, list[str]] = {}  # those that were begun, by channel

    def chance(self, who: str) -> random.Random:
        """Luck of one's own, by the seed."""
        return random.Random(f"{self.seed}/{who}")


class ClientKilled(Exception):
    """The client's process was killed in the middle of a call."""


class GivenUp(Exception):
    """A call was refused for good, or took longer than anything may: the log has it."""


class CountedTransport:
    """A client's way to the pool, for one question: `calls` counts how often it was sent."""

    def __init__(self, transport: Transport) -> None:
        self.address = transport.address
        self.calls = 0
        self._transport = transport

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        raise NotImplementedError("simulated clients await their calls")

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        self.calls += 1
        return await self._transport.acall(op, body, timeout, waits=waits)

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Client:
    """A process that calls the pool. `doubled`: the network may deliver its calls twice. `streams`: it is on the pool's
    machine, and has a connection to it instead."""

    def __init__(self, world: World, name: str, *, doubled: bool = True, streams: Streams | None = None) -> None:
        self.world, self.name = world, name
        self.chance = world.chance(name)
        self._streams = streams
        self._transport: Transport = SimulatedTransport(world.network, name, doubled=doubled)
        if streams is not None:
            self._transport = FrameTransport(name)
        self._calls: list[asyncio.Task[Any]] = []

    def log(self, event: str, **fields: Any) -> None:
        self.world.log.write(self.name, event, **fields)

    def kill(self) -> None:
        """Ends the process in the middle of its calls, each of which then raises `ClientKilled`."""
        for call in self._calls:
            call.cancel()
        if self._streams is not None and self.name in self._streams.clients and self.chance.random() < 0.5:
            self._streams.clients[self.name].lose(ConnectionResetError("the client's process ended"))

    async def ask(self, what: str, target: str, operation: Operation[Any]) -> tuple[Any, int]:
        """The pool's answer, and how often it was asked before. Raises `LeaseLost`, `ClientKilled` and `GivenUp`."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        transport = CountedTransport(self._transport)
        pool = RemotePool(transport, retry_s=RETRY_S)
        while True:
            call = loop.create_task(pool.execute_async(operation))
            self._calls.append(call)
            try:
                return await call, transport.calls - 1
            except LeaseLost:
                raise
            except (PoolUnreachable, JournalError, PoolClosed, PoolFull) as error:
                again_s = FULL_AGAIN_S if isinstance(error, PoolFull) else AGAIN_S
                self.log("failed", what=what, target=target, why=error.code)
            except HeadraceError as error:
                said = self.world.machine.shown(error)
                self.log(
                    "refused", what=what, trajectory=target, status=error.code, said=said, count=transport.calls - 1
                )
                raise GivenUp from error
            except asyncio.CancelledError:
                self._check_killed()
                raise
            finally:
                self._calls.remove(call)
            waited_s = loop.time() - begun
            if waited_s > PATIENCE_S:
                self.log("stuck", what=what, target=target, waited_s=round(waited_s, 1))
                raise GivenUp
            await asyncio.sleep(again_s * self.chance.random())

    async def persist(self, what: str, operation: Operation[Any]) -> Any:
        """`ask`, by somebody who asks again after every kill; the answer."""
        while True:
            try:
                return (await self.ask(what, self.name, operation))[0]
            except ClientKilled:
                await self.come_back()

    async def pause(self, seconds: float) -> None:
        """Works for so long; a kill ends that too. Raises `ClientKilled`."""
        work = asyncio.get_running_loop().create_task(asyncio.sleep(seconds))
        self._calls.append(work)
        try:
            await work
        except asyncio.CancelledError:
            self._check_killed()
            raise
        finally:
            self._calls.remove(work)

    def _check_killed(self) -> None:
        """`ClientKilled`, unless it is the simulation that ends."""
        task = asyncio.current_task()
        assert task is not None
        if not task.cancelling():
            raise ClientKilled from None

    async def come_back(self) -> None:
        """Waits until the process is started again."""
        await asyncio.sleep(self.chance.expovariate(1 / BACK_S))
