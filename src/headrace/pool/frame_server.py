"""The pool served to other processes of this machine over a unix socket, as frames without HTTP.

Whoever can open the socket may do everything: its folder says who can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from headrace.pool.embedded import DataPool
from headrace.pool.frame_transport import HEAD, FrameReader
from headrace.pool.service import CallerGone, answer


class FrameConnection(asyncio.Protocol):
    """One caller's connection: every call is a task, and is answered when it has its answer."""

    def __init__(self, pool: DataPool, backup_to: Callable[[str], str]) -> None:
        """`backup_to` says where a backup goes for which the caller named a folder, or raises why it may not."""
        self._pool = pool
        self._backup_to = backup_to
        self._reader = FrameReader()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone: dict[int, asyncio.Event] = {}  # of calls under way: set once their caller left
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass

    def connection_lost(self, error: Exception | None) -> None:
        for gone in self._gone.values():
            gone.set()

    def data_received(self, data: bytes) -> None:
        for number, frame in self._reader.feed(data):
            if not frame:
                if number in self._gone:
                    self._gone[number].set()
                continue
            # Before the task runs: that its caller left may have come together with the call.
            gone = self._gone[number] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._answer(number, frame, gone))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, frame: bytes, gone: asyncio.Event) -> None:
        def left() -> Awaitable[object]:
            if gone.is_set():
                raise CallerGone
            return gone.wait()

        try:
            data, _ = await answer(self._pool, frame, left, self._backup_to)
        except CallerGone:
            return
        finally:
            self._gone.pop(number, None)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(HEAD.pack(len(data), number) + data)


async def serve_frames(pool: DataPool, path: str, backup_to: Callable[[str], str]) -> asyncio.AbstractServer:
    """Serves a pool on a new unix socket, until what this returns is closed."""
    return await asyncio.get_running_loop().create_unix_server(lambda: FrameConnection(pool, backup_to), path)
