"""Frames to a pool in another process of this machine, many at once over one unix socket, without HTTP around them.

A message is a head and a frame: the frame's length and the number of the call that it belongs to. Answers come in any
order. An empty frame says that the caller of a call has left.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from typing import cast

from headrace.pool.remote import Unreachable

#: A frame's length in bytes, and its call's number.
HEAD = struct.Struct("<QQ")
#: Seconds that connecting may take.
CONNECT_S = 5.0


class FrameReader:
    """Frames out of bytes: any chunking gives the same frames."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._size = 0  # of what is held
        self._need = HEAD.size  # how much there must be for more to be read

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that became whole with these bytes, each with its call's number."""
        self._held.append(data)
        self._size += len(data)
        if self._size < self._need:
            return []  # the parts of a large frame are put together once
        data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
        found: list[tuple[int, bytes]] = []
        at, end = 0, len(data)
        while end - at >= HEAD.size:
            length, number = HEAD.unpack_from(data, at)
            self._need = HEAD.size + length
            if end - at < self._need:
                break
            at += HEAD.size
            found.append((number, data[at : at + length]))
            at += length
            self._need = HEAD.size
        self._held = [data[at:]] if at < end else []
        self._size = end - at
        return found


class _Connection(asyncio.Protocol):
    """An event loop's connection, and the calls that wait for an answer on it."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unreachable(str(error) if error else "the connection was closed"))

    def data_received(self, data: bytes) -> None:
        for number, frame in self._reader.feed(data):
            waiting = self._waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def call(self, body: bytes, timeout_s: float) -> bytes:
        """The answer's frame. Raises `Unreachable`, also where the connection was lost before."""
        if not self.usable:
            raise Unreachable("the connection was closed")
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = answer
        limit = loop.call_later(timeout_s, _give_up, answer, timeout_s)
        assert self._transport is not None
        self._transport.write(HEAD.pack(len(body), number) + body)
        try:
            return await answer
        except BaseException:
            if self.usable:
                self._transport.write(HEAD.pack(0, number))
            raise
        finally:
            limit.cancel()
            del self._waiting[number]


def _give_up(answer: asyncio.Future[bytes], timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(Unreachable(f"no answer within {timeout_s:g} s"))


class FrameTransport:
    """Carries frames over a unix socket: one connection an event loop, opened when it is first needed; for a blocking
    call, one of its own."""

    def __init__(self, path: str) -> None:
        self.address = f"frames://{path}"
        self._path = path
        self._connections: dict[asyncio.AbstractEventLoop, asyncio.Task[_Connection]] = {}

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        reader = FrameReader()
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout)
                connection.connect(self._path)
                connection.sendall(HEAD.pack(len(body), 1) + body)
                while part := connection.recv(1 << 20):
                    for _, frame in reader.feed(part):
                        return frame
        except OSError as error:
            raise Unreachable(f"{self._path}: {error}") from error
        raise Unreachable("the connection was closed")

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        connection = await self._connection()
        return await connection.call(body, timeout)

    async def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        opening = self._connections.get(loop)
        if opening is not None and opening.done() and not _usable(opening):
            opening = None
        if opening is None:
            opening = self._connections[loop] = loop.create_task(self._open())
        if opening.done():
            return opening.result()
        return await asyncio.shield(opening)  # a caller that leaves does not end it: others wait for the same

    async def _open(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_unix_connection(_Connection, self._path)
        except OSError as error:  # a time-out among them
            raise Unreachable(f"{self._path}: {str(error) or 'no connection in time'}") from error
        return connection

    def close(self) -> None:
        """Nothing is kept for blocking calls."""

    async def aclose(self) -> None:
        opening = self._connections.pop(asyncio.get_running_loop(), None)
        if opening is not None and _usable(opening):
            opening.result().close()


def _usable(opening: asyncio.Task[_Connection]) -> bool:
    """Whether a connection is open; one that could not be opened, or was lost, is not."""
    return opening.done() and not opening.cancelled() and opening.exception() is None and opening.result().usable
