"""One simulation: a pool, its clients, and everything that can happen to them, by one seed; and what the storm's
checker says of its log."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from headrace.pool.operations.control import CompactJournal, SetVersion
from headrace.pool.operations.read import ReadStats, ReadTrajectoryStates
from headrace.storm.checker import Report, check
from headrace.storm.simulation.agents import SimulatedAgents
from headrace.storm.simulation.clients import PATIENCE_S, Client, GivenUp, SimulationLog, World
from headrace.storm.simulation.consumers import Checkpoint, SimulatedConsumer
from headrace.storm.simulation.faults import Faults
from headrace.storm.simulation.hooks import hooked
from headrace.storm.simulation.machine import Machine
from headrace.storm.simulation.network import Network
from headrace.storm.simulation.scheduler import NothingLeft, SimulatedLoop, SimulatedScheduler
from headrace.storm.simulation.streams import Streams

#: Where the files of a simulation are kept, if it is there: a file system in memory.
MEMORY_FOLDER = Path("/dev/shm")
#: Calls that reach the pool in one simulation, unless told otherwise.
OPERATIONS = 10_000
#: Gateways, each of which plays one group at a time; every other one is on the pool's machine.
GATEWAYS = 10
#: Channels, and whether their rewards come after a trajectory's end; `direct` is for the consumer without leases.
CHANNELS = {"train": False, "late": True, "direct": False}
#: Groups that a channel holds: few enough that it is full now and then.
QUEUE = 24
#: Seconds between two versions, two ledgers and two compactions, on average.
VERSION_S, LEDGER_S, COMPACT_S = 10.0, 10.0, 25.0
#: Trajectories whose states are asked for at once.
STATES_AT_ONCE = 1000
#: Seconds between two looks at whether all is done.
LOOK_S = 0.5


class Played(msgspec.Struct, frozen=True):
    """What came of one simulation. `operations`: calls that reached the pool; `virtual_s`: seconds that passed in it;
    `starts`: times that the pool was opened;
    `faults`: how many of each kind; `digest`: the same for the same log."""

    seed: int
    report: Report
    operations: int
    virtual_s: float
    starts: int
    faults: dict[str, int]
    digest: str


def play(seed: int, *, operations: int = OPERATIONS, folder: Path | None = None) -> Played:
    """Plays one simulation and checks its log, which is written to the `folder` where one is given."""
    memory = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headrace-simulation-", dir=memory) as place:
        return _Simulation(seed, operations, Path(place)).play(folder)


class _Simulation:
    def __init__(self, seed: int, operations: int, place: Path) -> None:
        self._seed, self._operations, self._place = seed, operations, place
        self._scheduler = SimulatedScheduler(self._chance("threads"))
        self._loop = SimulatedLoop(self._scheduler)
        self._log = SimulationLog(self._scheduler)

    def _chance(self, who: str) -> random.Random:
        return random.Random(f"{self._seed}/{who}")

    def play(self, folder: Path | None) -> Played:
        loop = self._loop
        channels = {
            name: {"overflow": "block", "max_queue_size": QUEUE, "require_reward": late}
            for name, late in CHANNELS.items()
        }
        # Every fifth pool promises to outlive its process alone: its machine then never stops.
        self._durability = "os" if self._seed % 5 == 4 else "fsync"
        self._machine = Machine(
            self._place,
            self._scheduler,
            loop,
            self._chance("machine"),
            channels,
            self._durability,  # type: ignore[arg-type]
            on_up=self._pool_is_up,
        )
        network = Network(self._machine, self._chance("network"))
        self._world = World(self._machine, network, self._log, self._seed)
        self._admin = Client(self._world, "admin")
        self._asking = asyncio.Lock()
        loop.set_exception_handler(lambda _loop, _context: None)  # processes end in the middle of everything
        try:
            with hooked(self._scheduler, loop, self._machine.wall, self._machine.boot_id, self._chance("names")):
                try:
                    asyncio.set_event_loop(loop)
                    loop.run_until_complete(self._run())
                except NothingLeft as error:
                    self._log.write("simulation", "stuck", what="everything", target=str(error), waited_s=PATIENCE_S)
                finally:
                    asyncio.set_event_loop(None)
                    loop.close()
        finally:
            self._scheduler.close()
        if folder is not None:
            self._log.save(folder)
        faults = Counter(event["kind"] for event in self._log.events if event["e"] == "fault")
        return Played(
            self._seed,
            check(self._log.events),
            self._machine.served,
            self._scheduler.now,
            self._machine.opened,
            dict(sorted(faults.items())),
            self._log.digest,
        )

    async def _run(self) -> None:
        world, machine = self._world, self._machine
        self._log.write("simulation", "begin", seed=self._seed, durability=self._durability)
        checkpoints = {channel: Checkpoint() for channel in CHANNELS}
        streams = Streams(machine, self._chance("streams"))
        self._loop.connect = streams.connect
        gateways = [
            SimulatedAgents(world, f"gateway{number}", CHANNELS, streams if number % 2 else None)
            for number in range(1, GATEWAYS + 1)
        ]
        consumers = [
            SimulatedConsumer(
                world, f"trainer-{channel}-{number}", channel, checkpoints[channel], leased=channel != "direct"
            )
            for channel, number in (("train", 1), ("train", 2), ("late", 1), ("late", 2), ("direct", 1), ("direct", 2))
        ]
        faults = Faults(world, [*gateways, *consumers, self._admin], power=self._durability == "fsync")
        machine.start()
        await machine.up.wait()
        agents = [asyncio.ensure_future(gateway.run()) for gateway in gateways]
        around: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(consumer.run for consumer in consumers),
            faults.run,
            self._raise_versions,
            self._note_ledgers,
            self._compact,
        ]
        tasks = [asyncio.ensure_future(work()) for work in around]
        try:
            while machine.served < self._operations and machine.died is None:
                await asyncio.sleep(LOOK_S)
            world.stopping = True
            faults.stop()
            await self._end(agents, consumers)
        finally:
            for task in (*agents, *tasks):
                task.cancel()
            await asyncio.gather(*agents, *tasks, return_exceptions=True)
            await machine.close()

    async def _end(self, agents: list[asyncio.Task[None]], consumers: list[SimulatedConsumer]) -> None:
        """Agents end what they began, consumers take what is left; then the pool tells of itself."""
        machine = self._machine
        until = self._scheduler.now + PATIENCE_S
        while not all(agent.done() for agent in agents) and machine.died is None:
            if self._scheduler.now > until:
                self._log.write("simulation", "stuck", what="agents", target="gateways", waited_s=PATIENCE_S)
                break
            await asyncio.sleep(LOOK_S)
        if machine.died is not None:
            self._log.write("simulation", "died", target="pool", how=machine.died)
            return
        for failure in self._scheduler.failures:
            self._log.write("simulation", "died", target="thread", how=machine.shown(failure))
        for agent in agents:
            if agent.done() and agent.exception() is not None:
                self._log.write("simulation", "died", target="agent", how=repr(agent.exception()))
        with contextlib.suppress(GivenUp):
            await self._drain(consumers)
            for channel, uids in self._world.trajectories.items():
                for at in range(0, len(uids), STATES_AT_ONCE):
                    some = uids[at : at + STATES_AT_ONCE]
                    rows = await self._admin.persist("states", ReadTrajectoryStates(some, channel))
                    states = {row["trajectory_uid"]: row["state"] for row in rows}
                    self._log.write("simulation", "states", channel=channel, states=states)
            await self._note_ledger("end")
        self._log.write("simulation", "end")

    async def _drain(self, consumers: list[SimulatedConsumer]) -> None:
        """Waits until consumers have taken all that is complete, and have it: the answer that brings it to one without
        a lease may be lost, and is asked for again."""
        until = self._scheduler.now + PATIENCE_S
        while self._scheduler.now < until:
            stats = await self._admin.persist("stats", ReadStats())
            groups = [channel["groups"] for channel in stats["channels"].values()]
            if not any(group["ready"] or group["leased"] for group in groups):
                break
            await asyncio.sleep(LOOK_S)
        had = {consumer: consumer.answers for consumer in consumers if not consumer.leased}
        while self._scheduler.now < until:
            if all(consumer.answers > before for consumer, before in had.items()):
                return
            await asyncio.sleep(LOOK_S)
        self._log.write("simulation", "stuck", what="drain", target="consumers", waited_s=PATIENCE_S)

    # -- the admin's work ----------------------------------------------------------------------------------------------

    def _pool_is_up(self) -> None:
        self._log.write("machine", "ready", target="pool", boot=self._machine.boot)

    async def _raise_versions(self) -> None:
        chance = self._chance("versions")
        version = 0
        while True:
            await asyncio.sleep(chance.expovariate(1 / VERSION_S))
            version += 1
            self._log.write("admin", "version.sent", version=version)
            await self._admin.persist("version", SetVersion(version))
            self._log.write("admin", "version.acked", version=version)

    async def _note_ledgers(self) -> None:
        """Looks at the ledger now and then, and after each start of the pool."""
        chance = self._chance("ledgers")
        seen = 0
        while True:
            until = self._scheduler.now + chance.expovariate(1 / LEDGER_S)
            while self._scheduler.now < until and seen == self._machine.opened:
                await asyncio.sleep(LOOK_S)
            seen = self._machine.opened
            await self._note_ledger("restart")

    async def _note_ledger(self, when: str) -> None:
        async with self._asking:
            asked = self._log.time()
            stats = await self._admin.persist("stats", ReadStats())
            ledgers = {name: channel["ledger"] for name, channel in stats["channels"].items()}
            self._log.write("admin", "ledger", when=when, asked=asked, channels=ledgers)

    async def _compact(self) -> None:
        chance = self._chance("compactions")
        while True:
            await asyncio.sleep(chance.expovariate(1 / COMPACT_S))
            await self._admin.persist("compact", CompactJournal())
