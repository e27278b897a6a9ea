"""Is the agent still there? A call is cancelled when its agent hangs up, so that nobody samples for no one.

The answer on its way: whole, or events with comments in their pauses. The status is decided by the first byte.

An agent that stops reading has left: what is under way for it ends, so that it holds up no pause and no shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType

from starlette.responses import Response
from starlette.types import Message, Receive, Send

#: Who answers sooner need not look whether anybody is still there.
WATCH_AFTER_S = 0.02


class ClientGone(Exception):
    """The agent left before it was answered."""


class DisconnectWatch:
    """Watches a request's connection from its body's end on; inside the block, a hang-up raises `HungUp`.

    `settle` ends the watch: from there on the call goes through, whoever listens.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._settled = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        self._caller = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)
        return self

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._settled and self._caller is not None:
            self._gone = True
            self._caller.cancel()

    def settle(self) -> None:
        self._settled = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled = True
        self._timer.cancel()
        if self._watch is not None and not self._watch.done():
            self._watch.cancel()
        if self._gone and kind is asyncio.CancelledError:
            if self._caller is not None:
                self._caller.uncancel()
            raise ClientGone from None


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ResponseWriter:
    """One response. Once `expect` was called it may begin by itself, with a comment, when nothing comes for long."""

    def __init__(self, send: Send, keep_alive_s: float, patience_s: float) -> None:
        self._to_agent = send
        self._patience_s = patience_s
        self._keep_alive_s = keep_alive_s
        self._headers: list[tuple[bytes, bytes]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._quiet = True
        self.begun = False

    async def whole(self, response: Response) -> None:
        """A response in one piece."""
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": response.body})

    async def relay(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Begins somebody else's answer, which `pass_on` brings as it is."""
        self.begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def pass_on(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def expect(self, headers: Mapping[str, str]) -> None:
        """Events will come, under these headers."""
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._keeper = asyncio.create_task(self._keep_alive())

    async def event(self, data: bytes) -> None:
        if data:
            self._quiet = False
            await self._write(data, more=True)

    async def last(self, data: bytes) -> None:
        """The last events; nothing follows."""
        self.close()
        await self._write(data, more=False)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + self._headers}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._to_agent(message)
        except TimeoutError:
            raise ClientGone from None

    async def _keep_alive(self) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._quiet:
                try:
                    await self._write(KEEP_ALIVE_COMMENT, more=True)
                except ClientGone:
                    return  # whoever writes next finds it out too
