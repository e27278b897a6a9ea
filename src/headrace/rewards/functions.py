"""Blocking rules and users' functions, called in processes of their own (`function_child.py`).

A call has a time limit that holds: a process that does not answer in time is killed, and the next call gets a fresh
one. A function that is not asynchronous runs in up to `workers` processes, one call each; an asynchronous one in a
single process, many calls at once. Where that one dies with several calls in it, each is called again in a process of
its own, so that the call that killed it fails alone.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from headrace.data.errors import InvalidInput
from headrace.processes import ending_words
from headrace.rewards.function_child import (
    LENGTH,
    CalleeKind,
    CalleeSpec,
    FunctionAnswer,
    FunctionCall,
    encoded,
)
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.rewards.source import Outcome, RewardCounters, RewardSource, attempts, raised, spread

#: Seconds for a process to start and import what it is to call: torch alone may take dozens on a busy machine.
START_S = 300.0
#: Seconds beyond the limit in which an asynchronous function lets itself be cancelled, before its process is killed.
CANCEL_S = 5.0

Message = TypeVar("Message", bound=msgspec.Struct)


class FunctionProcessDied(Exception):
    """The process ended during a call; `alone` where only that call can have ended it."""

    def __init__(self, how: str, alone: bool) -> None:
        super().__init__(how)
        self.alone = alone


class FunctionProcess:
    """One process. `calls` are the calls that wait for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[FunctionAnswer]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._killed = False
        #: Killed for a call that was given up, which waits no more when its end is read: nobody who does is to blame.
        self._given_up = False
        self.asynchronous = False

    @classmethod
    async def start(cls, spec: CalleeSpec) -> FunctionProcess:
        """Starts one that has loaded what `spec` names. Raises `InvalidInput` where that cannot be loaded."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.rewards.function_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        made = cls(process)
        try:
            async with asyncio.timeout(START_S):
                await made._write(spec)
                kind = await made._read(CalleeKind)
        except TimeoutError:
            await made.end()
            raise InvalidInput(f"{named(spec)} was not imported within {START_S:g} s") from None
        except BaseException:
            await made.end()
            raise
        if kind is None:
            how = await made.end()
            raise InvalidInput(f"{named(spec)}: its process {how} while it was imported")
        if kind.error:
            await made.end()
            raise InvalidInput(f"{named(spec)} cannot be imported: {kind.error}")
        made.asynchronous = kind.asynchronous
        made._reader = asyncio.create_task(made._read_answers())
        return made

    @property
    def alive(self) -> bool:
        """Whether it answers calls."""
        return self._reader is not None and not self._reader.done() and not self._killed

    async def call(self, samples: Sequence[Sample], batch: bool, timeout_s: float) -> FunctionAnswer:
        """The answer to one call. Its time includes that in which a process that is busy with others does not read it.
        Raises `RewardFailure` (`timeout`), after which a process that is not asynchronous is dead, and
        `FunctionProcessDied`."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(FunctionCall(number, list(samples), batch))
                return await asyncio.shield(answer)
        except TimeoutError:
            await self._cancel(number, answer)
            raise RewardFailure(f"it took more than {timeout_s:g} s", "timeout") from None
        except asyncio.CancelledError:
            await self._cancel(number, answer)
            raise
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # it was raised, or nobody waits for it any more
            answer.cancel()

    async def _cancel(self, number: int, answer: asyncio.Future[FunctionAnswer]) -> None:
        """Ends a call: by a word where it is asynchronous, otherwise, or where that does not help, with its process."""
        try:
            if self.asynchronous and self.alive:
                self._send(FunctionCall(number, cancel=True))
                await asyncio.wait([answer], timeout=CANCEL_S)
        finally:
            if not answer.done():
                self._given_up = True
                self._kill()

    async def end(self) -> str:
        """Ends it, and says how it ended."""
        self._kill()
        code = await self._process.wait()
        if self._reader is not None:
            await self._reader
        if self._process.stdin is not None:
            self._process.stdin.close()
        return ending_words(code)

    def _kill(self) -> None:
        """Ends the process with all that it started, which is its session's."""
        self._killed = True
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _send(self, message: msgspec.Struct) -> None:
        """Sends a message without waiting until it is read: while a coroutine blocks the process' loop, nothing is."""
        assert self._process.stdin is not None
        self._process.stdin.write(encoded(message))

    async def _write(self, message: msgspec.Struct) -> None:
        """Sends a message and waits until little of it is unread, for as long as the caller lets it. Raises
        `FunctionProcessDied`."""
        assert self._process.stdin is not None
        try:
            self._send(message)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            if self._reader is None:
                return  # its end is read next
            raise FunctionProcessDied("had ended before the call", alone=False) from None

    async def _read(self, kind: type[Message]) -> Message | None:
        assert self._process.stdout is not None
        try:
            (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(length), type=kind)
        except asyncio.IncompleteReadError:
            return None

    async def _read_answers(self) -> None:
        while (found := await self._read(FunctionAnswer)) is not None:
            waiting = self._waiting.get(found.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(found)
        code = await self._process.wait()
        how = ending_words(code)
        lost = [one for one in self._waiting.values() if not one.done()]
        alone = len(lost) == 1 and not self._given_up
        for one in lost:
            one.set_exception(FunctionProcessDied(how, alone))


class FunctionSource(RewardSource):
    """A blocking rule or a user's function. With `batch_size` it takes lists of up to so many samples."""

    def __init__(
        self,
        name: str,
        weight: float,
        spec: CalleeSpec,
        *,
        counters: RewardCounters,
        retries: int,
        timeout_s: float,
        workers: int,
        concurrency: int,
        batch_size: int = 0,
    ) -> None:
        self.name, self.weight = name, weight
        self._spec = spec
        self._counters = counters
        self._retries, self._timeout_s = retries, timeout_s
        self._workers, self._concurrency = workers, concurrency
        self._batch_size = batch_size
        self._asynchronous: bool | None = None
        self._idle: list[FunctionProcess] = []
        self._all: set[FunctionProcess] = set()
        self._slots = asyncio.Semaphore(workers)
        self._many = asyncio.Semaphore(concurrency)
        self._starting = asyncio.Lock()

    async def ready(self) -> None:
        async with self._starting:
            if self._asynchronous is None:
                self._idle.append(await self._start())

    async def scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        try:
            await self.ready()
        except InvalidInput as error:
            return [RewardFailure(str(error), "unavailable", self.name, again=False) for _ in samples]
        size = max(self._batch_size, 1)
        parts = [samples[at : at + size] for at in range(0, len(samples), size)]
        at_once = self._concurrency if self._asynchronous else self._workers
        found = await spread(parts, self._part if self._batch_size else self._alone, at_once)
        return [outcome for part in found for outcome in part]

    async def aclose(self) -> None:
        for process in list(self._all):
            await self._end(process)
        self._idle.clear()

    async def _alone(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcome of one sample, after all its attempts."""

        async def call() -> Score:
            (outcome,) = await self._called(samples)
            if isinstance(outcome, RewardFailure):
                raise outcome
            return outcome

        return [await attempts(call, self._retries, self._counters)]

    async def _part(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes of a batch; samples that failed in it are called again each by itself."""
        try:
            outcomes = await self._called(samples)
        except RewardFailure as failure:
            outcomes = [failure for _ in samples]
        again = [
            at for at, one in enumerate(outcomes) if isinstance(one, RewardFailure) and one.again and self._retries
        ]
        self._counters.retried += len(again)
        for at in again:
            (outcomes[at],) = await self._alone([samples[at]])
        return outcomes

    async def _called(self, samples: Sequence[Sample]) -> list[Outcome]:
        """The outcomes of one call. Raises `RewardFailure` where the call failed as a whole."""
        try:
            if self._asynchronous:
                answer = await self._call_shared(samples)
            else:
                async with self._slots:
                    answer = await self._call_own(samples)
        except FunctionProcessDied as died:
            raise RewardFailure(f"its process {died} during the call", "error", self.name) from None
        except RewardFailure as failure:
            raise failure.of(self.name) from None
        except InvalidInput as error:
            raise RewardFailure(str(error), "unavailable", self.name) from None
        except Exception as error:  # such as over a row that has no form on the wire
            raise raised(error, self.name) from error
        if answer.failure is not None:
            raise self._failure(answer.failure)
        return [Score(**one) if isinstance(one, dict) else self._failure(one) for one in answer.scores]

    async def _call_own(self, samples: Sequence[Sample]) -> FunctionAnswer:
        """A call in a process that has no other."""
        process = self._idle.pop() if self._idle else await self._start()
        try:
            return await process.call(samples, bool(self._batch_size), self._timeout_s)
        finally:
            if process.alive and not self._asynchronous:
                self._idle.append(process)
            else:
                await self._end(process)

    async def _call_shared(self, samples: Sequence[Sample]) -> FunctionAnswer:
        """A call in the process that has all; in one of its own where that one died with others in it."""
        async with self._many:
            async with self._starting:
                if not (self._idle and self._idle[0].alive):
                    for process in self._idle:
                        await self._end(process)
                    self._idle[:] = [await self._start()]
                shared = self._idle[0]
            try:
                return await shared.call(samples, bool(self._batch_size), self._timeout_s)
            except FunctionProcessDied as died:
                if died.alone:
                    raise
        async with self._slots:
            process = await self._start()
            try:
                return await process.call(samples, bool(self._batch_size), self._timeout_s)
            finally:
                await self._end(process)

    async def _start(self) -> FunctionProcess:
        process = await FunctionProcess.start(self._spec)
        self._all.add(process)
        self._asynchronous = process.asynchronous
        return process

    async def _end(self, process: FunctionProcess) -> None:
        self._all.discard(process)
        await process.end()

    def _failure(self, told: Sequence[Any]) -> RewardFailure:
        reason, detail, again = told
        return RewardFailure(detail, reason, self.name, again=again)


def named(spec: CalleeSpec) -> str:
    """What a process calls, as messages name it."""
    return f"the rule {spec.rule}" if spec.rule else spec.function
