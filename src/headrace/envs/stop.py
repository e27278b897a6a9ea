"""How an environment is told to end: the first request lets work in flight finish, the second ends it at once."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from headrace.envs.server import ServerManager

log = logging.getLogger("headrace.envs")

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds between two checks whether the items in flight can still end.
CHECK_S = 0.25
#: Seconds that a rollout server may take for a health check before items that wait for it are cancelled: a busy one
#: answers within that, and whoever stops an environment does not want to wait longer.
HEALTH_TIMEOUT_S = 2.0


class StopRequest:
    """`asked` is set by the first request, `forced` by the second."""

    def __init__(self) -> None:
        self.asked, self.forced = asyncio.Event(), asyncio.Event()
        self._unheard = False

    def request(self) -> None:
        """Asks for the end; the second time, for an end at once."""
        if self.asked.is_set():
            self.forced.set()
        self.asked.set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Makes Ctrl-C and SIGTERM requests meanwhile, in the main thread; elsewhere it changes nothing.

        Where code blocks the event loop, so that the first one is not handled, the second raises KeyboardInterrupt.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()

        def heard() -> None:
            self._unheard = False
            self.request()

        def hear(number: int, frame: FrameType | None) -> None:
            if self._unheard:
                raise KeyboardInterrupt
            self._unheard = True
            loop.call_soon_threadsafe(heard)

        before = {number: signal.signal(number, hear) or signal.SIG_DFL for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def or_done(self, work: Coroutine[Any, Any, T], event: asyncio.Event | None = None) -> T | None:
        """The result of the work; None where `event`, by default `asked`, came first and cancelled it."""
        task = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future((event or self.asked).wait())
        try:
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if task.cancelled() else task.result()


async def wait_for_items(items: Collection[asyncio.Task[Any]], server: ServerManager) -> None:
    """Returns once the items have ended, or cannot, as no rollout server answers their calls."""
    left = set(items)
    while left:
        _, left = await asyncio.wait(left, timeout=CHECK_S)
        if left and (why := await server.unanswered(HEALTH_TIMEOUT_S)) is not None:
            log.warning("%d items are broken off, as no rollout server answers them: %s", len(left), why)
            return
