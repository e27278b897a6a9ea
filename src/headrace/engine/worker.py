"""The thread that steps the scheduler, and how other threads reach it.

Only this thread touches the scheduler. Others hand it functions, which it runs between two steps, in order. New tokens
and ends are delivered to the event loop of each call, once a step for all of its sequences.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import EngineSequence

log = logging.getLogger(__name__)
T = TypeVar("T")


class SequenceDelta(NamedTuple):
    """What is new of a sequence: its tokens [first, last), their text, and how it ended where it has."""

    sequence: EngineSequence
    first: int
    last: int
    text: str
    finish_reason: str | None


class EngineCall:
    """The sequences of one request, and the queue of their deltas. Must be made on the event loop that awaits it."""

    def __init__(self, request_id: str, sequences: list[EngineSequence], *, stream: bool) -> None:
        self.request_id, self.sequences, self.stream = request_id, sequences, stream
        self.loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[SequenceDelta] = asyncio.Queue()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self._open = len(sequences)
        for sequence in sequences:
            sequence.call = self

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return not self._open

    def tell(self, delta: SequenceDelta) -> None:
        """Queues a delta of one of its sequences. Called on the call's event loop."""
        if self.stream:
            self.news.put_nowait(delta)
        if delta.finish_reason is not None:
            self._open -= 1
            if not self._open and not self.done.done():
                self.done.set_result(None)


class Worker:
    """Runs the scheduler in a thread. Any thread or event loop may call its methods."""

    def __init__(self, scheduler: Scheduler, ended: Callable[[EngineSequence], None] = lambda sequence: None) -> None:
        """`ended` is called with every sequence that ends, in the worker's thread."""
        self._scheduler = scheduler
        self._ended = ended
        self._inbox: SimpleQueue[Callable[[Scheduler], object] | None] = SimpleQueue()
        self._drained: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs; without it no call is ever answered."""
        return self._thread.is_alive()

    def submit(self, call: EngineCall) -> None:
        """Queues the call's sequences to be sampled."""
        self._inbox.put(lambda scheduler: scheduler.add(call.sequences))

    def abort(self, gone: Callable[[EngineSequence], bool]) -> None:
        """Ends the sequences for which `gone` is true; does not wait."""
        self._inbox.put(lambda scheduler: self._tell(scheduler.abort(gone)))

    async def ask(self, question: Callable[[Scheduler], T]) -> T:
        """Runs a function of the scheduler between two steps; returns its result or raises its error."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run(scheduler: Scheduler) -> None:
            try:
                found = question(scheduler)
            except Exception as error:
                _hand_over(loop, _fail, answer, error)
            else:
                _hand_over(loop, _settle, answer, found)

        self._inbox.put(run)
        return await answer

    async def stop_all(self, gone: Callable[[EngineSequence], bool]) -> int:
        """Ends the sequences for which `gone` is true; returns how many."""

        def end(scheduler: Scheduler) -> int:
            ended = scheduler.abort(gone)
            self._tell(ended)
            return len(ended)

        return await self.ask(end)

    async def pause(self, mode: str) -> None:
        """Pauses by `mode` (see `Scheduler.pause`); returns once nothing is stepped."""
        loop = asyncio.get_running_loop()
        quiet = asyncio.Event()

        def begin(scheduler: Scheduler) -> None:
            self._tell(scheduler.pause(mode))
            self._drained.append(lambda: _hand_over(loop, quiet.set))

        await self.ask(begin)
        await quiet.wait()

    def close(self) -> None:
        """Aborts what still runs and ends the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        scheduler = self._scheduler
        while True:
            try:
                command = self._inbox.get(block=not scheduler.busy)
            except Empty:
                self._attempt("a step", lambda: self._tell(scheduler.step()))
                continue
            if command is None:
                self._tell(scheduler.abort(lambda _: True))
                return
            self._attempt("a command", partial(command, scheduler))

    def _attempt(self, what: str, do: Callable[[], object]) -> None:
        """Steps or commands the scheduler by `do`; where that fails, what was running is answered with the error."""
        try:
            do()
        except Exception as error:
            log.exception("%s failed; what was running is answered with an error", what)
            self._tell(self._scheduler.fail(f"{type(error).__name__}: {error}"))
        self._quiet()

    def _quiet(self) -> None:
        """Wakes those who wait for a pause once it is in force, or was cancelled."""
        if self._drained and not self._scheduler.draining:
            for tell in self._drained:
                tell()
            self._drained.clear()

    def _tell(self, batch: Iterable[EngineSequence]) -> None:
        news: defaultdict[asyncio.AbstractEventLoop, list[SequenceDelta]] = defaultdict(list)
        for sequence in batch:
            reason = sequence.finish_reason
            if reason is not None:
                self._ended(sequence)
            if sequence.call is not None and (sequence.stream or reason is not None):
                news[sequence.call.loop].append(_delta(sequence))
        for loop, deltas in news.items():
            _hand_over(loop, _deliver, deltas)


def _delta(sequence: EngineSequence) -> SequenceDelta:
    first, shown = sequence.told, sequence.shown
    sequence.told, sequence.shown = len(sequence.output), max(shown, sequence.settled())
    text = sequence.text.value[shown : sequence.shown]
    return SequenceDelta(sequence, first, sequence.told, text, sequence.finish_reason)


def _hand_over(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *given: object) -> None:
    """Calls a function on an event loop, from the worker's thread; not where it was closed, and nothing awaits it."""
    try:
        loop.call_soon_threadsafe(function, *given)
    except RuntimeError:
        pass


def _deliver(deltas: list[SequenceDelta]) -> None:
    for delta in deltas:
        delta.sequence.call.tell(delta)


def _settle(answer: asyncio.Future[T], found: T) -> None:
    if not answer.done():
        answer.set_result(found)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
