"""The simulated network between clients and the pool: it delays, reorders, loses and duplicates calls, loses answers,
and breaks connections; all by the seed.

A call travels as the frame that the pool's real client made, whole. What arrives a second time, perhaps minutes later,
is carried out and answered to nobody, as a proxy's own retry is.
"""

from __future__ import annotations

import asyncio
import random
from typing import Literal

from headrace.pool.remote import Unreachable
from headrace.storm.simulation.machine import Machine

#: What a network can do for a while, to one client or to all.
NetworkFault = Literal["drop", "delay", "duplicate", "reset"]
NETWORK_FAULTS: tuple[NetworkFault, ...] = ("drop", "delay", "duplicate", "reset")
#: Seconds that a message travels: at least, and on average more.
TRAVEL_S, TRAVEL_MORE_S = 0.0002, 0.001
#: Seconds more while the network is slow, on average.
DELAY_S = 3.0
#: How often a call is lost, doubled, or broken off, where nothing is wrong in particular, and while it is.
RARELY, OFTEN = 0.003, 0.4
#: Seconds after which the network breaks a connection on which no answer came, however long the caller would wait.
QUIET_S = 60.0
#: Seconds after which a doubled call arrives again: mostly soon, sometimes when all that it was about is over.
AGAIN_S, LATE_AGAIN_S, LATE = 0.05, 120.0, 0.3


class Network:
    """Between all clients and one machine."""

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        self._machine = machine
        self._chance = chance
        self._faults: dict[str, NetworkFault] = {}

    def begin(self, client: str, fault: NetworkFault) -> None:
        """Spoils one client's connection; `*`: everyone's."""
        self._faults[client] = fault

    def heal(self, client: str | None = None) -> None:
        """Ends what was begun for a client, or for all."""
        if client is None:
            self._faults.clear()
        else:
            self._faults.pop(client, None)

    def _does(self, client: str, fault: NetworkFault) -> bool:
        now = self._faults.get(client) or self._faults.get("*")
        return self._chance.random() < (OFTEN if now == fault else RARELY)

    def _travel_s(self, client: str) -> float:
        slow = self._chance.expovariate(1 / DELAY_S) if self._does(client, "delay") else 0.0
        return TRAVEL_S + self._chance.expovariate(1 / TRAVEL_MORE_S) + slow

    async def call(self, client: str, body: bytes, timeout: float, *, doubled: bool) -> bytes:
        """The answer to a call. Raises `Unreachable`. `doubled`: it may arrive twice."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[bytes] = loop.create_future()
        gone = asyncio.Event()
        travel_s = self._travel_s(client)
        if not self._does(client, "drop"):
            loop.call_later(travel_s, self._arrive, client, body, arrived, gone, doubled)
        if doubled and self._does(client, "duplicate"):
            mean_s = LATE_AGAIN_S if self._chance.random() < LATE else AGAIN_S
            loop.call_later(travel_s + self._chance.expovariate(1 / mean_s), self._arrive_again, body)
        if self._does(client, "reset"):
            loop.call_later(2 * self._chance.random() * travel_s, _break, arrived, "the connection was reset")
        quiet_s = min(timeout, QUIET_S)
        limit = loop.call_later(quiet_s, _break, arrived, f"no answer within {quiet_s:g} s")
        try:
            return await arrived
        finally:
            limit.cancel()
            gone.set()

    def _arrive(
        self, client: str, body: bytes, arrived: asyncio.Future[bytes], gone: asyncio.Event, doubled: bool
    ) -> None:
        if gone.is_set() and not doubled:
            return  # with the connection went what was on its way
        machine = self._machine
        if machine.pool is None:
            if machine.powered:
                _break(arrived, "connection refused")
            return
        loop = asyncio.get_running_loop()

        def reply(data: bytes) -> None:
            if not self._does(client, "drop"):
                loop.call_later(self._travel_s(client), _deliver, arrived, data)

        def lost() -> None:
            loop.call_later(self._travel_s(client), _break, arrived, "the connection was reset")

        machine.serve(body, gone, reply, lost)

    def _arrive_again(self, body: bytes) -> None:
        if self._machine.pool is not None:
            self._machine.serve(body, asyncio.Event(), lambda _: None, lambda: None)


def _break(arrived: asyncio.Future[bytes], why: str) -> None:
    if not arrived.done():
        arrived.set_exception(Unreachable(why))


def _deliver(arrived: asyncio.Future[bytes], data: bytes) -> None:
    if not arrived.done():
        arrived.set_result(data)


class SimulatedTransport:
    """A client's way to the pool, under the pool's real client. `doubled`: the network may deliver its calls twice."""

    def __init__(self, network: Network, client: str, *, doubled: bool = True) -> None:
        self.address = f"simulated://{client}"
        self._network, self._client, self._doubled = network, client, doubled

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        raise NotImplementedError("simulated clients await their calls")

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        return await self._network.call(self._client, body, timeout, doubled=self._doubled)

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
