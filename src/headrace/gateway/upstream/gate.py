"""What holds a request back: the gate that is closed during a pause, and the deadline of a call.

Requests wait at the gate without an error or a time-out. A request that is past it is in flight until it ends; only one
whose answer was aborted comes back to wait again. Time while the servers are paused does not count for a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace.gateway.upstream.errors import RolloutServerFailed

T = TypeVar("T")


class Gate:
    """Lets requests through while it is open, and counts those that wait and those in flight."""

    def __init__(self) -> None:
        #: How often everything in flight was aborted; an abort that came while this moved was asked for.
        self.aborts = 0
        self.in_flight = 0
        self.waiting = 0
        #: Called when it closes.
        self.closing: Callable[[], None] = lambda: None
        self._opened: asyncio.Event | None = None
        self._changed = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        """Makes requests wait from now on."""
        if self._opened is None:
            self._opened = asyncio.Event()
            self.closing()

    def open(self) -> None:
        """Lets go of all that wait."""
        if self._opened is not None:
            self._opened.set()
            self._opened = None
        self._notify()

    async def wait_open(self) -> None:
        """Returns once the gate is open; meanwhile the request counts as `waiting`."""
        self.waiting += 1
        try:
            await self.opened()
        finally:
            self.waiting -= 1

    async def opened(self) -> None:
        """Returns once the gate is open, without being counted."""
        while self._opened is not None:
            await self._opened.wait()

    def enter(self) -> None:
        """Counts a request that passed the gate as in flight, until `leave`."""
        self.in_flight += 1

    def leave(self) -> None:
        """Counts a request that has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._notify()

    def abort(self) -> None:
        """Notes that everything in flight is being aborted."""
        self.aborts += 1
        self._notify()

    async def wait_abort(self, since: int, within_s: float) -> bool:
        """Whether `aborts` has moved on from `since`, or does within so many seconds."""
        try:
            async with asyncio.timeout(within_s):
                while self.aborts == since:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_quiet(self) -> None:
        """Returns once nothing is in flight, or the gate was opened again."""
        while self.in_flight and self.closed:
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Deadline:
    """How long one request may take, over every server that it is sent to: `idle_s` in silence, `call_s` in all.

    It waits for one thing at a time, and does not run while it is frozen. One timer serves all its waits: where it goes
    off and a later wait has more time left, it is set anew. `close` comes after the last wait."""

    __slots__ = ("_due", "_end", "_expired", "_frozen", "_idle_s", "_loop", "_set_for", "_task", "_timer")

    def __init__(self, idle_s: float, call_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_s = idle_s
        self._end = self._loop.time() + call_s
        self._due = 0.0  # of the wait that is under way
        self._task: asyncio.Task[Any] | None = None  # that waits
        self._timer: asyncio.TimerHandle | None = None
        self._set_for = 0.0
        self._expired = False
        self._frozen: float | None = None

    async def wait(self, thing: Awaitable[T], who: str) -> T:
        """Awaits `thing`; `RolloutServerFailed` of kind `hang` after `idle_s`, `late` after `call_s` in all."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._task = task
        if self._frozen is None:
            self._due = min(self._loop.time() + self._idle_s, self._end)
            if self._timer is None or self._set_for > self._due:
                self._set_timer()
        try:
            return await thing
        except asyncio.CancelledError:
            if not self._expired:
                raise
            self._expired = False
            if task.uncancel() > before:
                raise  # somebody else cancelled it too
            if self._loop.time() >= self._end:
                raise RolloutServerFailed(
                    f"{who} did not finish: the request took longer than call_s in all", "late"
                ) from None
            raise RolloutServerFailed(f"{who} sent nothing for {self._idle_s:g} s", "hang") from None
        finally:
            self._task = None
            if self._expired:  # the thing came, or failed, as the time ran out
                self._expired = False
                task.uncancel()

    def renew(self) -> None:
        """Within a wait: something came, so that `idle_s` begins anew."""
        if self._frozen is None:
            self._due = min(self._loop.time() + self._idle_s, self._end)

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def freeze(self) -> None:
        """Stops both clocks until `thaw`."""
        if self._frozen is None:
            self._frozen = self._loop.time()
            self.close()

    def thaw(self) -> None:
        """Starts them again: `idle_s` anew, `call_s` where it stopped."""
        if self._frozen is not None:
            now = self._loop.time()
            self._end += now - self._frozen
            self._frozen = None
            if self._task is not None:
                self._due = min(now + self._idle_s, self._end)
                self._set_timer()

    def _set_timer(self) -> None:
        self.close()
        self._set_for = self._due
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        """The timer went off: for the wait that is under way, for an earlier one, or for none."""
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._due:
            self._set_timer()
        else:
            self._expired = True
            self._task.cancel()
