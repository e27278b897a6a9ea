"""How long a call may take: so long in silence, so long in all. Time while the servers are frozen does not count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from headrace.gateway.upstream.errors import Failed

T = TypeVar("T")


class Patience:
    """One order's, over every server that it is sent to. Waits for one thing at a time."""

    __slots__ = ("_end", "_frozen", "_idle_s", "_loop", "_scope")

    def __init__(self, idle_s: float, call_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._end = self._loop.time() + call_s
        self._scope: asyncio.Timeout | None = None
        self._frozen: float | None = None

    async def wait(self, thing: Awaitable[T], who: str) -> T:
        """What it gives; `Failed` where it takes too long (`hang`), or the order does in all (`late`)."""
        try:
            async with asyncio.timeout_at(self._deadline()) as self._scope:
                return await thing
        except TimeoutError:
            if self._scope is None or not self._scope.expired():
                raise  # the thing's own
            if self._loop.time() >= self._end:
                raise Failed(f"{who} did not finish: the order took longer than call_s in all", "late") from None
            raise Failed(f"{who} sent nothing for {self._idle_s:g} s", "hang") from None
        finally:
            self._scope = None

    def freeze(self) -> None:
        if self._frozen is None:
            self._frozen = self._loop.time()
            if self._scope is not None:
                self._scope.reschedule(None)

    def thaw(self) -> None:
        if self._frozen is not None:
            self._end += self._loop.time() - self._frozen
            self._frozen = None
            if self._scope is not None:
                self._scope.reschedule(self._deadline())

    def _deadline(self) -> float | None:
        if self._frozen is not None:
            return None
        return min(self._loop.time() + self._idle_s, self._end)
