"""The gate before all orders: closed while weights are exchanged. Orders wait at it without an error or a time-out.

An order that is past it is in flight until it ends; only one whose answer was aborted comes back to wait again.
"""

from __future__ import annotations

import asyncio


class Gate:
    def __init__(self) -> None:
        #: How often everything in flight was aborted; an abort that came while this moved was asked for.
        self.aborts = 0
        self.in_flight = 0
        self.waiting = 0
        self._opened: asyncio.Event | None = None
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        if self._opened is None:
            self._opened = asyncio.Event()

    def open(self) -> None:
        if self._opened is not None:
            self._opened.set()
            self._opened = None
        self._notify()

    async def wait_open(self) -> None:
        """For an order, which is counted among those that wait."""
        self.waiting += 1
        try:
            await self.opened()
        finally:
            self.waiting -= 1

    async def opened(self) -> None:
        """The same for who is no order."""
        while self._opened is not None:
            await self._opened.wait()

    def enter(self) -> None:
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._notify()

    def abort(self) -> None:
        """Everything in flight is being aborted."""
        self.aborts += 1
        self._notify()

    async def wait_abort(self, since: int, within_s: float) -> bool:
        """Whether everything in flight was aborted since there were so many aborts, or is within so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                while self.aborts == since:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_quiet(self) -> None:
        """Until nothing is in flight, or the gate was opened again."""
        while self.in_flight and self.closed:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
