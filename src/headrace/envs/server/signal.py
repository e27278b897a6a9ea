"""Waiting until something changes, of several things that may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Signal:
    """Wakes whoever waits for a change at this moment."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    @staticmethod
    async def any_of(signals: Sequence[Signal]) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for signal in signals:
            signal._waiting.add(future)
        try:
            await future
        finally:
            for signal in signals:
                signal._waiting.discard(future)
