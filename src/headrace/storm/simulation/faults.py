"""What happens to a simulated pool and its clients: which fault, when, and for how long, by the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from headrace.storm.simulation.clients import Client, World
from headrace.storm.simulation.machine import Failure
from headrace.storm.simulation.network import NETWORK_FAULTS

Kind = Literal[
    "kill",
    "power",
    "restart",
    "network",
    "full_disk",
    "slow_disk",
    "failed_sync",
    "clock",
    "client_kill",
]
#: How often each comes, of all of them.
WEIGHTS: dict[Kind, int] = {
    "kill": 6,
    "power": 6,
    "restart": 2,
    "network": 8,
    "full_disk": 3,
    "slow_disk": 2,
    "failed_sync": 1,
    "clock": 2,
    "client_kill": 8,
}
#: Seconds between two faults, and that one lasts, on average.
BETWEEN_S, HOLD_S = 2.0, 4.0
#: Calls to the disk within which a process ends that is to end in the middle of one.
WITHIN_CALLS = 60
#: Bytes that a disk has left when it is full, at most.
LEFT_BYTES = 4000
#: Seconds by which a clock is set, forward or back: a little, or much.
CLOCK_STEPS_S = (2.0, 30.0, 4000.0)


class Faults:
    """Begins one fault after the other until it is stopped, which ends them all. `power`: the machine may stop too."""

    def __init__(self, world: World, clients: Sequence[Client], *, power: bool) -> None:
        self._world, self._clients = world, clients
        self._chance = world.chance("faults")
        self._kinds = [kind for kind in WEIGHTS if power or kind not in ("power", "failed_sync")]
        self._weights = [WEIGHTS[kind] for kind in self._kinds]
        self._failures: tuple[Failure, ...] = ("kill", "power") if power else ("kill",)
        world.machine.failures = self._failures
        self._stopped = False

    async def run(self) -> None:
        chance = self._chance
        under_way: list[asyncio.Task[None]] = []
        try:
            while not self._stopped:
                under_way = [task for task in under_way if not task.done()]
                kind = chance.choices(self._kinds, self._weights)[0]
                under_way.append(asyncio.ensure_future(self._do(kind)))
                await asyncio.sleep(chance.expovariate(1 / BETWEEN_S))
            await asyncio.gather(*under_way)
        finally:
            for task in under_way:
                task.cancel()

    def stop(self) -> None:
        """Begins no more; those that are under way come to their end."""
        self._stopped = True
        self._world.network.heal()
        disk = self._world.machine.disk
        disk.free_bytes, disk.slow, disk.fail_next_sync = None, False, False

    async def _do(self, kind: Kind) -> None:
        """Carries out one fault, from its beginning to its end."""
        chance, world, machine = self._chance, self._world, self._world.machine
        disk = machine.disk
        hold_s = chance.expovariate(1 / HOLD_S)

        def note(target: str = "pool", **more: object) -> None:
            world.log.write("faults", "fault", kind=kind, target=target, **more)

        match kind:
            case "kill" | "power":
                within = chance.randrange(WITHIN_CALLS) if chance.random() < 0.5 else None
                note(within=within)
                if within is None:
                    await machine.fail(kind)
                else:
                    machine.fail_within(kind, within)
            case "restart":
                note()
                await machine.restart()
            case "network":
                client = "*" if chance.random() < 0.3 else chance.choice(self._clients).name
                how = chance.choice(NETWORK_FAULTS)
                note(client, how=how, hold_s=hold_s)
                world.network.begin(client, how)
                await asyncio.sleep(hold_s)
                world.network.heal(client)
            case "full_disk":
                disk.free_bytes = chance.randrange(LEFT_BYTES)
                note(free=disk.free_bytes, hold_s=hold_s)
                await asyncio.sleep(hold_s)
                disk.free_bytes = None
            case "slow_disk":
                note(hold_s=hold_s)
                disk.slow = True
                await asyncio.sleep(hold_s)
                disk.slow = False
            case "failed_sync":
                note(hold_s=hold_s)
                disk.fail_next_sync = True
                await asyncio.sleep(hold_s)
                disk.fail_next_sync = False
                await machine.restart()  # the pool asks for it: what is on its disk is unknown until read back
            case "clock":
                by = chance.uniform(-1, 1) * chance.choice(CLOCK_STEPS_S)
                note(by=by)
                machine.clock_ahead_s += by
            case "client_kill":
                killed = chance.choice(self._clients)
                note(killed.name)
                killed.kill()
