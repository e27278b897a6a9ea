"""A storm: a whole system, agents that use it, and a plan of what goes wrong with it. Then everything heals, what is
left is learned from, and the log is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import HeadraceError
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.pool.connect import connect
from headrace.pool.errors import PoolError
from headrace.processes import ChildDied
from headrace.storm.agents import StormAgents
from headrace.storm.checker import Report, check
from headrace.storm.environment import ApiLoad
from headrace.storm.learner import learned_groups
from headrace.storm.log import EventLog, read_logs
from headrace.storm.plan import OF_GATEWAY, Fault, PoolKind, Sizes, make_plan
from headrace.storm.services import SlowDisk, StormProcess, Stuck
from headrace.storm.soak import SOAKED_CHANNEL, Growth, Soak
from headrace.storm.system import LEARNER_CHANNEL, System, build_system
from headrace.version import __version__

#: Seconds between new policy versions, and between looks at what is left at the end.
VERSION_S = 2.0
LOOK_S = 0.25
#: Seconds for which a worker or an actor that is to be killed, and is being started again, is waited for.
BACK_S = 60.0
#: Trajectories whose states are asked for at once.
STATES_AT_ONCE = 1000

#: What is coming back after a fault, by process: several where one was killed again within its start.
Starting = dict[str, list[asyncio.Task[None]]]


class Storm:
    """One storm in one folder, which is empty before."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        sizes: Sizes,
        pool: PoolKind,
        other_python: Path | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder, self._seed, self._sizes, self._pool = folder, seed, sizes, pool
        self._pythons = [sys.executable] if other_python is None else [sys.executable, str(other_python)]
        self._tell = tell
        folder.mkdir(parents=True, exist_ok=True)
        self._log = EventLog(folder, "storm")
        self._ledger_turn = asyncio.Lock()

    async def run(self, soak_s: float | None = None) -> tuple[Report, list[Growth]]:
        """Plays the storm, or with `soak_s` load alone for so long, and checks its log: what it says, and with a soak
        what grew."""
        self._log.write("begin", seed=self._seed, version=__version__, pool=self._pool)
        self._tell(f"seed {self._seed}, pool {self._pool}, folder {self._folder}")
        where = self._folder, self._log, self._sizes, self._pool, self._seed, self._pythons
        async with build_system(*where, {} if soak_s is None else SOAKED_CHANNEL) as system:
            try:
                growth = await self._play(system, soak_s)
            finally:
                if self._pool == "ray":
                    _leave_cluster()
        self._log.write("end")
        return check(read_logs(self._folder)), growth

    async def _play(self, system: System, soak_s: float | None) -> list[Growth]:
        agents = StormAgents(
            system.agents_address,
            self._log,
            system.tenants,
            system.channels,
            seed=self._seed,
            patience_s=self._sizes.patience_s,
        )
        await self._note_ledger(system, "start")
        growth: list[Growth] = []
        async with AsyncExitStack() as beside:
            if "learner" not in system.services:  # which raises them itself
                await beside.enter_async_context(_alongside(self._raise_versions(system)))
            try:
                if soak_s is not None:
                    growth = await Soak(system, agents, self._log, self._sizes.agents).run(soak_s)
                else:
                    await self._play_faults(system, agents)
            finally:
                await agents.close()
        with contextlib.suppress(ChildDied):  # it is in the log: what is left is checked all the same
            self._check_crashes(system)
        with contextlib.suppress(Stuck):
            await self._drain(system)
            await self._note_learned(system)
            await self._note_states(system)
            await self._note_ledger(system, "end")
        return growth

    async def _play_faults(self, system: System, agents: StormAgents) -> None:
        """Plays agents while the plan is carried out; then all heals, and they end what they began."""
        scored = ApiLoad(
            system.links["environments"].address,
            lambda: system.services["api"].address,
            self._log,
            patience_s=self._sizes.patience_s,
        )
        await scored.begin()
        playing = [asyncio.create_task(agents.run(number)) for number in range(self._sizes.agents)]
        playing += [asyncio.create_task(scored.post()), asyncio.create_task(scored.take())]
        try:
            try:
                await self._faults(system)
            except (Stuck, ChildDied) as error:  # it is in the log; what is left is checked all the same
                self._tell(f"the storm is cut short: {error}")
                with contextlib.suppress(Stuck, ChildDied):
                    await asyncio.gather(*(one.start() for one in system.services.values() if one.crashed))
            self._tell("faults are over; agents end what they began")
            agents.stopping = scored.stopping = True
            system.heal()
            ended, going = await asyncio.wait(playing, timeout=2 * self._sizes.patience_s)
            for task in ended:
                task.result()  # raises what an agent did not expect: that is a fault of the storm's
            if going:
                self._log.write("stuck", what="end", target="agents", waited_s=2 * self._sizes.patience_s)
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            await scored.close()

    # -- faults --------------------------------------------------------------------------------------------------------

    async def _faults(self, system: System) -> None:
        plan = make_plan(self._seed, self._sizes, system.targets, system.links_at_risk, system.journal_owner)
        until = time.monotonic() + self._sizes.seconds if self._sizes.seconds is not None else None
        starting: Starting = {}
        try:
            for number, fault in enumerate(plan, 1):
                if until is not None and time.monotonic() > until:
                    break
                await asyncio.sleep(fault.pause_s)
                name = system.process_of(fault.target).name if fault.kind != "network" else fault.target
                if not fault.at_once or all(task.done() for task in starting.get(name, ())):
                    await asyncio.gather(*starting.pop(name, ()))  # raises what went wrong with it
                self._check_crashes(system)
                await self._do(system, fault, starting)
                if number % 50 == 0:
                    self._tell(f"{number} of {len(plan)} faults")
            await asyncio.gather(*itertools.chain(*starting.values()))
        except (Stuck, ChildDied):
            await asyncio.gather(*itertools.chain(*starting.values()), return_exceptions=True)  # the rest comes back
            raise
        finally:
            left = list(itertools.chain(*starting.values()))
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _do(self, system: System, fault: Fault, starting: Starting) -> None:
        """Carries out one fault, from its beginning to its end; what is to start again is added to `starting`."""

        def recover(name: str, work: Coroutine[Any, Any, None]) -> None:
            starting.setdefault(name, []).append(asyncio.create_task(work))

        def note(**more: Any) -> None:
            self._log.write("fault", kind=fault.kind, target=fault.target, hold_s=fault.hold_s, **more)

        match fault.kind:
            case "network":
                assert fault.network is not None
                link = system.links[fault.target]
                note(network=fault.network)
                link.begin(fault.network)
                await asyncio.sleep(fault.hold_s)
                link.heal()
            case "freeze":
                service, pid = system.find(fault.target, self._seed)
                note(pid=pid)
                service.signal(signal.SIGSTOP, pid)
                await asyncio.sleep(fault.hold_s)
                service.signal(signal.SIGCONT, pid)
            case "full_disk" | "descriptors" | "memory":
                service, pid = system.find(fault.target, self._seed)
                if fault.kind == "full_disk":
                    lift = service.fill_disk(system.journal, pid)
                elif fault.kind == "descriptors":
                    lift = service.limit_descriptors(pid)
                else:
                    lift = service.limit_memory(pid)
                if lift is None:
                    return
                note(pid=pid)
                await asyncio.sleep(fault.hold_s)
                lift()
                if fault.kind == "memory" and service.excuse_end():
                    recover(service.name, self._start(system, service))
            case "slow_disk":
                note()
                disk = SlowDisk(self._folder)
                await asyncio.sleep(fault.hold_s)
                await asyncio.to_thread(disk.stop)
            case "clock":
                if fault.target in system.services:  # an actor's is its machine's
                    note(ahead_s=fault.ahead_s)
                    system.services[fault.target].set_clock(fault.ahead_s)
            case "kill" | "restart":
                service, pid = await self._find(system, fault.target)
                if pid is not None:  # a worker, or an actor: its gateway, or Ray, replaces it
                    note(pid=pid)
                    # Ray takes an actor that ends by SIGTERM for one that is meant to be gone.
                    term = fault.kind == "restart" and fault.target in OF_GATEWAY
                    service.signal(signal.SIGTERM if term else signal.SIGKILL, pid)
                    if fault.target == system.journal_owner:
                        recover(service.name, self._note_ledger(system, "restart"))
                    return
                if system.is_replaced(fault.target):
                    return  # it is on its way
                note(pid=service.pid)
                if fault.kind == "kill":
                    await service.kill()
                else:
                    await service.end()
                    service.take_next_python()
                recover(service.name, self._start(system, service))

    async def _find(self, system: System, target: str) -> tuple[StormProcess, int | None]:
        """`System.find`, once what others start again is there again; without it where that takes too long."""
        give_up = time.monotonic() + BACK_S
        while True:
            service, pid = system.find(target, self._seed)
            if pid is not None or not system.is_replaced(target) or time.monotonic() > give_up:
                return service, pid
            await asyncio.sleep(LOOK_S)

    def _check_crashes(self, system: System) -> None:
        """Raises `ChildDied` where a process has ended by itself; it is in the log then."""
        for service in system.services.values():
            if service.crashed:
                self._log.write("died", target=service.name, how=f"its log is {service.name}.log")
                raise ChildDied(f"{service.name} ended by itself")

    async def _start(self, system: System, service: StormProcess) -> None:
        if await service.start() and system.brings_pool(service.name):
            await self._note_ledger(system, "restart")

    # -- versions ------------------------------------------------------------------------------------------------------

    async def _raise_versions(self, system: System) -> None:
        """A trainer that syncs weights now and then: tells the gateway each new version, again until it is answered."""
        async with _client() as client:
            for version in itertools.count(1):
                await asyncio.sleep(VERSION_S)
                self._log.write("version.sent", version=version)
                while True:
                    with contextlib.suppress(NoAnswer):
                        url = f"{system.gateway.address}/policy_version"
                        answer = await client.request("POST", url, json={"version": version}, headers=system.admin)
                        if answer.status == 200:
                            break
                    await asyncio.sleep(LOOK_S)
                self._log.write("version.acked", version=version)

    # -- looking in ----------------------------------------------------------------------------------------------------

    async def _note_ledger(self, system: System, when: str) -> None:
        """Logs the pool's ledger, by channel, as it tells it: one at a time, so that the log has them in order."""
        async with self._ledger_turn:
            asked = time.monotonic_ns()
            stats = await self._ask_pool(system, methodcaller("stats"))
            channels = {name: channel["ledger"] for name, channel in stats["channels"].items()}
            self._log.write("ledger", when=when, asked=asked, channels=channels)

    async def _drain(self, system: System) -> None:
        """Waits until consumers have taken all that is complete."""
        give_up = time.monotonic() + self._sizes.patience_s
        while time.monotonic() < give_up:
            stats = await self._ask_pool(system, methodcaller("stats"))
            groups = [channel["groups"] for channel in stats["channels"].values()]
            if not any(group["ready"] or group["leased"] for group in groups) and not await self._unscored(system):
                return
            await asyncio.sleep(LOOK_S)
        self._log.write("stuck", what="drain", target="consumers", waited_s=self._sizes.patience_s)

    async def _note_learned(self, system: System) -> None:
        """Logs from how many groups the trainer of a real model has learned, once it has ended."""
        if (learner := system.services.get("learner")) is not None:
            await learner.end()
            self._log.write("learned", channel=LEARNER_CHANNEL, groups=learned_groups(self._folder))

    async def _unscored(self, system: System) -> bool:
        for channel in system.channels:
            page = await self._ask_pool(system, methodcaller("unscored", channel, limit=1))
            if page["items"]:
                return True
        return False

    async def _note_states(self, system: System) -> None:
        """Logs where every trajectory stands that agents began."""
        by_channel: dict[str, list[str]] = {}
        for line in self._log.path.read_bytes().splitlines():
            event = orjson.loads(line)
            if event["e"] == "trajectory":
                by_channel.setdefault(event["channel"], []).append(event["trajectory"])
        for channel, uids in by_channel.items():
            for at in range(0, len(uids), STATES_AT_ONCE):
                some = uids[at : at + STATES_AT_ONCE]
                rows = await self._ask_pool(system, methodcaller("trajectory_states", some, channel))
                states = {uid: row["state"] for uid, row in zip(some, rows, strict=True)}
                self._log.write("states", channel=channel, states=states)

    async def _ask_pool(self, system: System, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """What the pool answers over its public interface, asked again while it is away. Raises `Stuck`."""
        give_up = time.monotonic() + self._sizes.patience_s
        while True:
            pool = connect(system.pool_address, key=system.pool_key, retry_s=0)
            try:
                return await ask(pool.aio)
            except (PoolError, NoAnswer) as error:
                if time.monotonic() > give_up:
                    self._log.write("stuck", what="pool", target=system.pool_address, waited_s=self._sizes.patience_s)
                    raise Stuck(f"the pool did not answer within {self._sizes.patience_s:g} s: {error}") from error
                await asyncio.sleep(LOOK_S)
            finally:
                await pool.aclose()


def _leave_cluster() -> None:
    """Lets go of the Ray cluster before it ends, which would be an error of ours otherwise."""
    import ray

    ray.shutdown()


@asynccontextmanager
async def _client() -> AsyncIterator[AsyncHttpClient]:
    client = AsyncHttpClient(total_s=30)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def _alongside(work: Any) -> AsyncIterator[None]:
    """Runs a coroutine for as long as the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def random_seed() -> int:
    """A seed for a storm that was given none."""
    return secrets.randbelow(10**6)


def run_storm(
    folder: Path,
    *,
    seed: int,
    sizes: Sizes,
    pool: PoolKind = "embedded",
    soak_s: float | None = None,
    other_python: Path | None = None,
    tell: Callable[[str], None] = print,
) -> tuple[Report, list[Growth]]:
    """Plays a storm in a folder, or with `soak_s` load alone: its report, and with a soak what grew. With
    `other_python`, processes that are restarted run there, and where they are restarted again, here. Raises
    `HeadraceError` where the folder is not empty, or the system does not even start."""
    if folder.exists() and any(folder.iterdir()):
        raise HeadraceError(f"{folder} is not empty; name another folder")
    storm = Storm(folder, seed=seed, sizes=sizes, pool=pool, other_python=other_python, tell=tell)
    return asyncio.run(storm.run(soak_s))
