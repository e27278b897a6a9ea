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
#: Seconds between two looks at whether what is finished before the end can still end.
LOOK_S = 0.25
#: Seconds that a rollout server may take to say that it is there, before work that waits for it is broken off: one that
#: is busy answers within them, and who stops an environment does not wait much longer.
ANSWER_S = 2.0


class StopRequest:
    def __init__(self) -> None:
        self.asked, self.forced = asyncio.Event(), asyncio.Event()
        self._unheard = False

    def request(self) -> None:
        if self.asked.is_set():
            self.forced.set()
        self.asked.set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """While this lasts, Ctrl-C and SIGTERM are requests. A loop outside the main thread cannot hear them.

        Code that does not let the loop run cannot hear the first one either: the second then interrupts it.
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
        """The result of the work, which is cancelled when the stop comes first; None then."""
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
    """Returns once items that are under way have ended, or cannot, as no rollout server answers their calls."""
    left = set(items)
    while left:
        _, left = await asyncio.wait(left, timeout=LOOK_S)
        if left and (why := await server.unanswered(ANSWER_S)) is not None:
            log.warning("%d items are broken off, as no rollout server answers them: %s", len(left), why)
            return
