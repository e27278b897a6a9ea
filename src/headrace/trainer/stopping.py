"""Stopping a run from outside: one `StopSignal` that ends every wait of the run, and the process signals that set it.

A wait is a future that is waited for together with the stop. Work that blocks (an HTTP call, a pool's answer) runs in
daemon threads, so a server that hangs keeps neither the run nor the process from ending.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from headrace.processes import INTERRUPTED

A = TypeVar("A")
T = TypeVar("T")

#: Seconds that a process which ends at once has for its last words: a terminal that is held (Ctrl-S) takes none.
LAST_WORDS_S = 0.5
#: Seconds that a worker which is closed may take to end: one that has nothing to do ends at once, one whose call hangs
#: is left to itself.
THREAD_END_S = 0.5


class Stopped(Exception):
    """The run was stopped before what was waited for was there."""


class StopSignal:
    """Set once, by whoever wants the run to end; `by` names them. Threads may set it and wait for it."""

    def __init__(self) -> None:
        self._told: Future[None] = Future()
        self._lock = threading.Lock()
        self.by = ""

    def set(self, by: str) -> None:
        """Ends all waits. Later calls change nothing, `by` included."""
        with self._lock:
            if not self._told.done():
                self.by = by
                self._told.set_result(None)

    def is_set(self) -> bool:
        return self._told.done()

    def wait(self, seconds: float) -> bool:
        """Waits for the stop, for at most so many seconds; returns whether it is set."""
        wait([self._told], timeout=seconds)
        return self._told.done()

    def result(self, future: Future[T], *, grace_s: float = 0.0, unless: Future[Any] | None = None) -> T:
        """The future's result. Raises `Stopped` where it is not done `grace_s` after the stop was set, and the
        exception of `unless` where that fails first."""
        either: set[Future[Any]] = {future, self._told}
        if unless is not None:
            either.add(unless)
        while not (future.done() or self._told.done()):
            wait(either, return_when=FIRST_COMPLETED)
            if unless is not None and unless in either and unless.done():
                if (error := unless.exception()) is not None and not future.done():
                    raise error
                either.remove(unless)
        if not future.done():
            wait([future], timeout=grace_s)
            if not future.done():
                raise Stopped
        return future.result()

    def call(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread of its own and returns its result. Raises `Stopped` where the stop comes first; the
        thread is then abandoned."""
        return self.result(in_thread(work))


class TaskThread:
    """A daemon thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._given: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues `work`; returns the future of its result."""
        future: Future[T] = Future()
        self._given.put(lambda: _into(future, work))
        return future

    def close(self) -> None:
        """Has the thread end after what is queued, and waits for it up to `THREAD_END_S`: a process that exits while a
        thread frees tensors is aborted."""
        self._given.put(_end)
        self._thread.join(THREAD_END_S)

    def _run(self) -> None:
        while (work := self._given.get()) is not _end:
            work()
            del work  # what it was about is not held while the next is waited for


def in_thread(work: Callable[[], T], name: str = "headrace-call") -> Future[T]:
    """Runs `work` in a daemon thread of its own; returns the future of its result."""
    future: Future[T] = Future()
    threading.Thread(target=_into, args=(future, work), name=name, daemon=True).start()
    return future


def _end() -> None:
    """Queued to end a `TaskThread`; never called."""


def _into(future: Future[T], work: Callable[[], T]) -> None:
    try:
        found = work()
    except BaseException as error:  # raised where the future is waited for
        future.set_exception(error)
    else:
        future.set_result(found)


@contextmanager
def on_signals(stop: Callable[[str], None], at_once: Callable[[], None]) -> Iterator[None]:
    """Has SIGTERM and SIGINT call `stop` with the signal's name. A Ctrl-C after that calls `at_once` and ends the
    process there and then: nothing is closed, which a run survives as it survives a crash.

    The signals are read from a socket by a thread: no handler interrupts the main thread, which may hold any lock, and
    the second Ctrl-C counts even while the main thread is deep in a computation.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        told = False
        while found := reader.recv(1):
            number = found[0]
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            if told and number == signal.SIGINT:
                wait([in_thread(at_once)], timeout=LAST_WORDS_S)
                os._exit(INTERRUPTED)
            if not told:
                told = True
                stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

    watcher = threading.Thread(target=watch, name="headrace-signals", daemon=True)
    watcher.start()
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken)
        writer.close()
        watcher.join()
        reader.close()


class Outage:
    """Whether a service answers. A reason why not is logged when it is new; so is how long the outage took once it
    ends. Thread-safe.

    `changed` is called with what is waited for, and with None when the outage is over.
    """

    def __init__(
        self, what: str, log: Callable[[str], None], changed: Callable[[str | None], None] = lambda words: None
    ) -> None:
        self.what = what
        self._log, self._changed = log, changed
        self._lock = threading.Lock()
        self._since: float | None = None
        self.reason = ""

    @property
    def is_down(self) -> bool:
        return self._since is not None

    def failed(self, reason: str) -> float:
        """Notes that the service did not answer; returns for how many seconds it has not."""
        with self._lock:
            now = time.monotonic()
            since = self._since if self._since is not None else now
            new = reason != self.reason or self._since is None
            self._since, self.reason = since, reason
        if new:
            self._log(f"waiting for {self.what}: {reason}")
            self._changed(f"{self.what}: {reason}")
        return now - since

    def answered(self) -> None:
        """Notes that the service answers; ends the outage where there was one."""
        with self._lock:
            since, self._since, self.reason = self._since, None, ""
        if since is not None:
            self._log(f"{self.what} answers again after {time.monotonic() - since:.0f} s")
            self._changed(None)


def for_each_in_threads(work: Callable[[A], T], items: Collection[A]) -> list[T]:
    """Calls `work` with each item, all at once; the results in the items' order. Waits for all, then raises the first
    error."""
    if len(items) < 2:
        return [work(item) for item in items]
    futures = [in_thread(partial(work, item), "headrace-sync") for item in items]
    wait(futures)
    return [future.result() for future in futures]
