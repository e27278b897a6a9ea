"""Live figures: one task makes the overview for all who listen, and each hears of what changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import orjson

from headrace.dashboard.records import Overview

#: Seconds between two overviews.
BEAT_S = 1.0
#: Seconds after which a stream ends, and the browser asks again: a server that cannot tell its streams that it is to
#: stop waits for them no longer.
STREAM_S = 4.0
#: Listeners at a time.
MAX_LISTENERS = 64


class LiveFigures:
    """Sends `data:` events with the fields of `Overview` that are others than before; the first one has them all."""

    def __init__(
        self, make: Callable[[], Awaitable[Overview]], beat_s: float = BEAT_S, stream_s: float = STREAM_S
    ) -> None:
        self._make, self._beat_s, self._stream_s = make, beat_s, stream_s
        self._listeners: set[asyncio.Event] = set()
        self._latest: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self.made = 0

    @property
    def full(self) -> bool:
        """Whether no more can listen."""
        return len(self._listeners) >= MAX_LISTENERS

    async def listen(self, stopping: Callable[[], Awaitable[None]]) -> AsyncIterator[bytes]:
        """A stream of server-sent events, for one browser. It ends when `stopping` returns."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._stream_s
        woken = asyncio.Event()
        self._listeners.add(woken)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat())
        elif self._latest:
            woken.set()
        stop = asyncio.ensure_future(stopping())
        stop.add_done_callback(lambda _: woken.set())
        sent: dict[str, Any] = {}
        try:
            yield b"retry: 300\n\n"
            while (left := end - loop.time()) > 0 and not stop.done():
                try:
                    async with asyncio.timeout(left):
                        await woken.wait()
                except TimeoutError:
                    break
                woken.clear()
                changed = {name: value for name, value in self._latest.items() if sent.get(name, ...) != value}
                sent = self._latest
                if changed:
                    yield b"data: " + orjson.dumps(changed) + b"\n\n"
        finally:
            self._listeners.discard(woken)
            stop.cancel()

    async def close(self) -> None:
        """Ends the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        while self._listeners:
            found = msgspec.to_builtins(await self._make())
            del found["at"]  # it always changes
            self.made += 1
            if found != self._latest:
                self._latest = found
                for listener in self._listeners:
                    listener.set()
            await asyncio.sleep(self._beat_s)
        self._latest = {}
