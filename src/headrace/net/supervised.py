"""Tasks that live as long as what they work for: what ends one too soon is logged and shown, and it is begun again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("headrace")

#: Seconds before a task that failed is begun again: the first time, and at most, when it fails again and again.
PAUSE_S, MOST_PAUSE_S = 0.2, 30.0


class Supervised:
    """Work that is not meant to end, in a task of its own. `trouble` says why it failed last, until it has run for as
    long as it was made to wait."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """`name` is what the log and `trouble` call it; `work` begins anew whenever it is called."""
        self._name = name
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self.trouble: str | None = None
        self.failures = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it runs in, once started."""
        assert self._task is not None
        return self._task.get_loop()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"headrace: {self._name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause_s = PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            calm = loop.call_later(pause_s, self._recovered)
            began = loop.time()
            try:
                await self._work()
                return  # it had nothing more to do
            except Exception as error:
                self.failures += 1
                self.trouble = f"{self._name} failed ({type(error).__name__}: {error}); it is begun again"
                log.exception("%s failed, and is begun again", self._name)
            finally:
                calm.cancel()
            pause_s = PAUSE_S if loop.time() - began > pause_s else min(pause_s * 2, MOST_PAUSE_S)
            await asyncio.sleep(pause_s)

    def _recovered(self) -> None:
        self.trouble = None
