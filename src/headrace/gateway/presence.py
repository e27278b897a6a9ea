"""Is the agent still there? A call is cancelled when its agent hangs up, so that nobody samples for no one."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive

#: Who answers sooner need not look whether anybody is still there.
MOMENT_S = 0.02


class HungUp(Exception):
    """The agent left before it was answered."""


class Presence:
    """Watches a request's connection from its body's end on; inside the block, a hang-up raises `HungUp`.

    `settle` ends the watch: from there on the call goes through, whoever listens.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._settled = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Presence:
        self._caller = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(MOMENT_S, self._begin)
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
            raise HungUp from None
