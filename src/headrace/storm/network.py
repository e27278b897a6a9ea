"""A network between two processes that fails on purpose: a TCP proxy that drops, delays, duplicates and resets.

A `Link` stands where a service is expected and passes bytes on to where it is. Its address stays when the service is
started anew on another port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import urllib.parse
from typing import Literal, get_args

NetworkFault = Literal["drop", "delay", "duplicate", "reset"]
NETWORK_FAULTS: tuple[NetworkFault, ...] = get_args(NetworkFault)

READ_BYTES = 1 << 16
#: Seconds by which each piece is late on a link that delays.
DELAY_S = 0.15
#: Closing a socket with this option sends a reset in place of an end.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Link:
    """One link: whoever connects to `address` speaks with the service at `point_at`, as well as the network allows.

    `drop`: nothing passes, and when that ends every connection that it held is reset. `delay`: every piece is late.
    `duplicate`: what connections send from now on arrives twice, on a second connection whose answers nobody reads.
    `reset`: all connections are reset, once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self._target: tuple[str, int] | None = None
        self._fault: NetworkFault | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def point_at(self, address: str | None) -> None:
        """Where the service is; None: nowhere. Connections that exist stay with the process that has them."""
        parts = urllib.parse.urlsplit(address or "")
        self._target = (parts.hostname or "127.0.0.1", parts.port) if parts.port else None

    def begin(self, fault: NetworkFault) -> None:
        """Begins a fault; `heal` ends it."""
        if fault == "reset":
            self._reset_all()
            return
        self._fault = fault
        if fault == "drop":
            self._passing.clear()

    def heal(self) -> None:
        """Ends what `begin` began."""
        if self._fault == "drop":
            self._reset_all()
        self._fault = None
        self._passing.set()

    def _reset_all(self) -> None:
        for writer in list(self._writers):
            _reset(writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        ends = [writer]
        try:
            await self._passing.wait()
            if self._target is None or writer.transport.is_closing():
                _reset(writer)
                return
            back, forth = await asyncio.open_connection(*self._target)
            ends.append(forth)
            self._writers.add(forth)
            copies = [forth]
            if self._fault == "duplicate":
                answers, second = await asyncio.open_connection(*self._target)
                ends.append(second)
                copies.append(second)
                unread = asyncio.create_task(_discard(answers))
                self._tasks.add(unread)
                unread.add_done_callback(self._tasks.discard)
            await asyncio.gather(self._pump(reader, copies), self._pump(back, [writer]))
        except OSError:
            _reset(writer)
        except asyncio.CancelledError:
            return  # the link is closed: asyncio would call that an error of the connection's
        finally:
            for end in ends:
                self._writers.discard(end)
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]) -> None:
        """Passes bytes on until the connection ends; then the other direction ends too."""
        try:
            while data := await reader.read(READ_BYTES):
                await self._passing.wait()
                if self._fault == "delay":
                    await asyncio.sleep(DELAY_S)
                for writer in writers:
                    writer.write(data)
                await writers[0].drain()
        finally:
            for writer in writers:
                with contextlib.suppress(OSError):
                    writer.close()


async def _discard(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(READ_BYTES):
            pass


def _reset(writer: asyncio.StreamWriter) -> None:
    held = writer.get_extra_info("socket")
    if held is not None:
        with contextlib.suppress(OSError):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()
