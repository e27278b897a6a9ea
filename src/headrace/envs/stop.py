"""How an environment is told to end: once, and what is in flight is finished and sent; twice, and it ends at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    def __init__(self) -> None:
        self.asked, self.forced = asyncio.Event(), asyncio.Event()

    def request(self) -> None:
        if self.asked.is_set():
            self.forced.set()
        self.asked.set()

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """While this lasts, Ctrl-C and SIGTERM are requests. A loop outside the main thread cannot hear them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

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
