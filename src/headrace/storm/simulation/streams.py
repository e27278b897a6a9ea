"""Connections that carry bytes, as a gateway's workers have one each to their pool, over which the real frames travel:
in pieces of any size, in order, and until the process at the other end is gone or the connection breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from headrace.pool.frame_server import FrameConnection
from headrace.storm.simulation.machine import Machine

#: Seconds that bytes travel within a machine, on average.
TRAVEL_S = 0.0003
#: How often bytes come in two pieces, and how often a connection breaks instead of carrying them.
SPLITS, BREAKS = 0.3, 0.002
#: Seconds that must lie between two arrivals, so that their order is the order in which they were sent.
APART_S = 1e-7


class SimulatedStream(asyncio.Transport):
    """One end of a connection; `peer` is the other."""

    peer: SimulatedStream

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._chance, self._protocol = loop, chance, protocol
        self._closing = False
        self._arrives = 0.0  # when the last that was sent does

    def is_closing(self) -> bool:
        return self._closing

    def write(self, data: Any) -> None:
        if self._closing:
            return
        chance, rest = self._chance, bytes(data)
        if chance.random() < BREAKS:
            return self.lose(ConnectionResetError("the connection was reset"))
        cut = chance.randrange(len(rest)) if chance.random() < SPLITS else 0
        for piece in (rest[:cut], rest[cut:]):
            if piece:
                travelled = self._loop.time() + chance.expovariate(1 / TRAVEL_S)
                self._arrives = max(self._arrives + APART_S, travelled)
                self._loop.call_at(self._arrives, self.peer._receive, piece)

    def close(self) -> None:
        self.lose(None)

    def abort(self) -> None:
        self.lose(None)

    def lose(self, error: Exception | None) -> None:
        """Ends the connection, at both ends."""
        self.peer.end(error)
        self.end(error)

    def end(self, error: Exception | None) -> None:
        """Tells whoever is at this end that the connection is over."""
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)

    def forget(self) -> None:
        """The process at this end is gone: the other end hears of it, and nobody here."""
        self._closing = True
        self.peer.end(ConnectionResetError("the pool's process ended"))

    def _receive(self, piece: bytes) -> None:
        if not self._closing:
            self._protocol.data_received(piece)


class Streams:
    """Connections to the machine's pool. `connect` stands for the event loop's own."""

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        self._machine, self._chance = machine, chance
        self.clients: dict[str, SimulatedStream] = {}  # the newest of each client, by its name

    async def connect(
        self, factory: Callable[[], asyncio.Protocol], path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """A connection to the pool; `ConnectionRefusedError` where its process is not there."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._chance.expovariate(1 / TRAVEL_S))
        pool = self._machine.pool
        if pool is None:
            raise ConnectionRefusedError("connection refused")
        mine, theirs = factory(), _CountedConnection(self._machine, pool, str)
        client, server = (SimulatedStream(loop, self._chance, protocol) for protocol in (mine, theirs))
        client.peer, server.peer = server, client
        self._machine.accept(server.forget, theirs.end_calls)
        self.clients[path] = client
        theirs.connection_made(server)
        mine.connection_made(client)
        return client, mine


class _CountedConnection(FrameConnection):
    """The pool's end of a connection, whose calls are counted, and end with the pool's process."""

    def __init__(self, machine: Machine, pool: Any, backup_to: Callable[[str], str]) -> None:
        super().__init__(pool, backup_to)
        self._machine = machine

    async def _answer(self, number: int, frame: bytes, gone: asyncio.Event) -> None:
        self._machine.served += 1
        await super()._answer(number, frame, gone)

    def end_calls(self) -> bool:
        """Has the calls that are being answered end; whether any is left."""
        for task in self._tasks:
            task.cancel()
        return bool(self._tasks)
