"""Simulated time and simulated threads: one thing runs at a time, and what comes next is decided by the clock and,
where two are due at once, by who came first. So a run is the same every time.

A simulated thread is a thread of the system that runs only while it holds the baton. It gives the baton up where it
would wait in the world: it sleeps, it waits for a lock, its disk works. Time passes only then: the clock moves to the
next thing that is due. The event loop is one of these threads; it waits where a real one asks the system for news.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

#: Seconds that a thread other than the event loop's may lose to others before it takes a lock.
RACE_S = 0.002
#: How often it does.
RACES = 0.3
#: Seconds that a thread is measured to have worked each time it asks: simulated work takes no time of its own, and who
#: works in slices would never come to the end of one.
WORK_S = 0.0011


#: Opens a connection for a protocol to be made, by a path: the transport and the protocol.
Connect = Callable[[Callable[[], asyncio.Protocol], str], Awaitable[tuple[asyncio.Transport, asyncio.Protocol]]]


class ProcessEnded(BaseException):
    """The simulated process was killed, or its machine stopped: nobody handles this."""


class NothingLeft(Exception):
    """Everything waits, and nothing will ever happen."""


class SimulatedThread:
    """A thread of the simulation. `killed`: what it does next raises `ProcessEnded`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.turn = 0  # counts its wake-ups: one that was meant for an earlier wait is none
        self.killed = False
        self.work: Callable[[], None] | None = None


class SimulatedScheduler:
    """The clock, and whose turn it is. Made and used by the simulation's own thread, which becomes its first."""

    def __init__(self, chance: random.Random) -> None:
        self.now = 0.0
        self.chance = chance
        self.main = self.current = SimulatedThread("main")
        self._due: list[tuple[float, int, SimulatedThread, int]] = []
        self._numbers = itertools.count()
        self.failures: list[BaseException] = []  # of work that should have handled its own
        self._idle: list[SimulatedThread] = []
        self._closing = False
        self._ended = False  # nothing can happen any more
        self._measured = 0

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wake(self, thread: SimulatedThread, at: float | None = None) -> None:
        """Has a thread that waits go on, now or at a time; nothing where it does not wait any more by then."""
        heapq.heappush(self._due, (self.now if at is None else at, next(self._numbers), thread, thread.turn))

    def sleep(self, seconds: float) -> None:
        """Lets so much time pass for the thread that calls."""
        self.park(self.now + seconds)

    def park(self, until: float | None = None) -> None:
        """Waits for `wake`, or until a time. `NothingLeft` where neither can come, `ProcessEnded` for a killed one."""
        me = self.current
        if me.killed:
            raise ProcessEnded
        if until is not None:
            self.wake(me, until)
        self._pass_on(me)
        if me.killed:
            raise ProcessEnded
        if self._ended:
            raise NothingLeft(f"nothing is left to happen at {self.now:.3f} s, and all wait")

    def _pass_on(self, me: SimulatedThread) -> None:
        """Gives the baton to whom is due next; returns when it is back."""
        while True:
            if not self._due:
                self._ended = True
                self.wake(self.main)  # who began all this has to hear of it
            at, _, thread, turn = heapq.heappop(self._due)
            if thread.turn == turn:
                break
        self.now = max(self.now, at)
        thread.turn += 1
        if thread is not me:
            self.current = thread
            thread.baton.release()
            me.baton.acquire()

    def measured(self) -> float:
        """Seconds as a stopwatch shows them: each look at it takes a little work's time."""
        self._measured += 1
        return self.now + self._measured * WORK_S

    # -- threads -------------------------------------------------------------------------------------------------------

    def spawn(self, work: Callable[[], None], name: str) -> SimulatedThread:
        """Has a thread do some work, from when the one that calls waits next. The work handles its own errors."""
        if self._idle:
            thread = self._idle.pop()
            thread.name = name
        else:
            thread = SimulatedThread(name)
            real = threading.Thread(target=self._run, args=(thread,), name="headrace-simulated", daemon=True)
            real.start()
        thread.work = work
        self.wake(thread)
        return thread

    def _run(self, thread: SimulatedThread) -> None:
        thread.baton.acquire()
        while not self._closing:
            assert thread.work is not None
            if not thread.killed:
                try:
                    thread.work()
                except ProcessEnded:
                    pass
                except BaseException as error:
                    self.failures.append(error)
            thread.work, thread.killed = None, False
            self._idle.append(thread)
            self._pass_on(thread)

    def kill(self, threads: list[SimulatedThread]) -> None:
        """Ends threads where they wait: what they were at is never finished."""
        for thread in threads:
            thread.killed = True
            self.wake(thread)
        while any(thread.killed for thread in threads):
            self.sleep(0)

    def close(self) -> None:
        """Has the threads of the system end that it made."""
        self._closing = True
        for thread in self._idle:
            thread.baton.release()


class SimulatedLock:
    """A lock between simulated threads. Threads other than the event loop's may come a little late to it, as they do
    in the world; by the seed."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self._scheduler = scheduler
        self._held = False
        self._waiting: deque[SimulatedThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        me = scheduler.current
        if me is not scheduler.main and not me.killed and blocking and scheduler.chance.random() < RACES:
            scheduler.sleep(scheduler.chance.random() * RACE_S)
        while self._held:
            if not blocking:
                return False
            self._waiting.append(me)
            try:
                scheduler.park()
            except BaseException:
                if me in self._waiting:
                    self._waiting.remove(me)
                elif not self._held:
                    self._wake_next()  # it was woken to take the lock, and cannot
                raise
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        self._wake_next()

    def locked(self) -> bool:
        return self._held

    def _wake_next(self) -> None:
        if self._waiting:
            self._scheduler.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop on simulated time. What it hands to executors is done by simulated threads: those of an executor of
    one's own one after the other, as the pool's, others at once."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._selector = self  # a `BaseEventLoop` asks its selector for news, which here is the clock's alone
        self._clock_resolution = 1e-9
        self._asleep = False
        self._queues: dict[Any, deque[Callable[[], None]]] = {}
        self.threads: list[SimulatedThread] = []  # those that work for the process that runs on this loop
        self.connect: Connect | None = None  # opens simulated connections

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> list[Any]:
        """Waits for the next timer or a wake-up from a thread; nothing else is ever reported."""
        if timeout is None or timeout > 0:
            self._asleep = True
            try:
                self._scheduler.park(None if timeout is None else self._scheduler.now + timeout)
            finally:
                self._asleep = False
        return []

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        """A simulated connection, whatever the path."""
        assert self.connect is not None
        return await self.connect(protocol_factory, path)

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        if self._asleep:
            self._scheduler.wake(self._scheduler.main)

    def spawn(self, work: Callable[[], None], name: str) -> None:
        """Has a thread do some work for the process that runs here."""
        started: list[SimulatedThread] = []

        def run() -> None:
            try:
                work()
            finally:
                self.threads.remove(started[0])

        started.append(self._scheduler.spawn(run, name))
        self.threads += started

    def kill_threads(self) -> None:
        """Ends all threads that work for the process, and what waits for their turn."""
        threads, queues = list(self.threads), list(self._queues.values())
        self._queues.clear()
        for queue in queues:
            queue.clear()
        self._scheduler.kill(threads)
        self.threads = [thread for thread in self.threads if thread not in threads]  # those that never began

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                self.call_soon_threadsafe(_fail, future, error)
                if isinstance(error, ProcessEnded):
                    raise
            else:
                self.call_soon_threadsafe(_succeed, future, result)

        if executor is None:
            self.spawn(work, "executor")
        else:
            queue = self._queues.get(executor)
            if queue is None:
                queue = self._queues[executor] = deque()
                queue.append(work)
                self.spawn(lambda: self._serve(executor, queue), "sync")
            else:
                queue.append(work)
        return future

    def _serve(self, executor: Any, queue: deque[Callable[[], None]]) -> None:
        """Does an executor's work in its order, until none is left."""
        while queue:
            queue[0]()
            if queue:
                queue.popleft()
        if self._queues.get(executor) is queue:
            del self._queues[executor]


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # the process may be gone that would have looked


def _succeed(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
