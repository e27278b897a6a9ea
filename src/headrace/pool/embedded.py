"""The pool in this process: its state with its journal, the calls on it, and those who wait.

A call takes the lock, plans, writes to the journal, applies, and lets go; then it waits until what it wrote is as safe
as promised. So facts reach disk in the order in which they were applied, and nobody waits for a disk with the lock
held. Callers who must wait (an empty queue, a full one) are woken by the call that changes that, or by the channel's
next deadline; nothing polls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.pool import facts as f
from headrace.pool.calls import AsyncPool, BlockingPool
from headrace.pool.config import DEFAULT_MEMORY_MB, ChannelConfig, Durability, Limits, choice
from headrace.pool.errors import DiskFull, PoolClosed
from headrace.pool.journal.files import Files
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.payloads import LoadedPayloads, read_payloads
from headrace.pool.journaled import JournaledState, MonotonicClock
from headrace.pool.operation import PENDING, Change, MustWait, Operation, Read, Upkeep
from headrace.pool.operations.consume import FetchBatch
from headrace.pool.operations.control import BackUpJournal, ForgetTrajectory
from headrace.pool.operations.read import ReadStats
from headrace.pool.operations.scored_consume import NackScoredBatch, TakeScoredBatch
from headrace.pool.state import State
from headrace.pool.views import MustLoad

log = logging.getLogger("headrace.pool")

#: Waits are cut to this: a lock cannot wait for centuries. Who wakes early looks, and waits on.
LONGEST_WAIT_S = 86_400.0


class DataPool(JournaledState, BlockingPool):
    """A timestamped queue of trajectories, grouped by prompt, in this process.

    `journal`: a directory; what was acknowledged is found there again. Without one the pool lives in memory.
    `durability`: what an acknowledgement outlives: `os` this process, `fsync` the machine; `memory` neither.
    `channels`: options by channel (see `ChannelConfig`); `defaults`: options of every other channel.
    In a journal each channel keeps the options it had, until others are given here.
    `clock`: what the time is; one of your own is believed, unless a `monotonic` one says when it was set.
    """

    def __init__(
        self,
        journal: str | os.PathLike[str] | None = None,
        *,
        durability: Durability | None = None,
        channels: Mapping[str, Mapping[str, Any] | ChannelConfig] | None = None,
        defaults: Mapping[str, Any] | ChannelConfig | None = None,
        limits: Limits | None = None,
        segment_mb: float = 64,
        quota_mb: float | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] | None = None,
        files: Files | None = None,
    ) -> None:
        safety = _durability(durability, journal)
        memory_bytes = _memory_bytes(limits or Limits(), journal)
        opened = None
        if journal is not None:
            opened = Journal(journal, durability=safety, segment_mb=segment_mb, quota_mb=quota_mb, files=files)
        base = defaults if isinstance(defaults, ChannelConfig) else ChannelConfig().changed(dict(defaults or {}))
        passing = monotonic or (time.monotonic if clock is time.time else None)
        state = State(base, limits or Limits())
        state.memory.limit = memory_bytes
        super().__init__(state, opened, MonotonicClock(clock, passing))
        self.durability = safety
        self._waiters: dict[str, dict[Callable[[], None], None]] = {}  # by channel, in the order in which they came
        self._was_closed = False  # all channels, when waiters were last told
        self._syncer: ThreadPoolExecutor | None = None
        # What waits until a backup or a compaction is over waits in a thread of its own: others must read meanwhile.
        # Who finds the journal full waits for compactions alone, and not behind a backup.
        self._rewriter = ThreadPoolExecutor(1, "headrace-rewrite")
        self._room_maker = ThreadPoolExecutor(1, "headrace-room")
        self._next_sync: _Sync | None = None  # one that has not begun
        self.aio = AsyncPool(self)
        try:
            if self._journal is not None:
                self._recover(self._journal)
            self._adopt(channels or {}, defaults is not None)
        except BaseException:
            self.close()
            raise

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _adopt(self, channels: Mapping[str, Mapping[str, Any] | ChannelConfig], with_defaults: bool) -> None:
        """Writes down options that differ from what the journal knew."""
        base = self._state.defaults
        for name, channel in self._state.channels.items() if with_defaults else ():
            if channel.by_default and channel.config != base and name not in channels:
                self._settle_one(f.Defaulted(name, self._time.now(), base))
        for name, options in channels.items():
            config = options if isinstance(options, ChannelConfig) else base.changed(dict(options))
            if name not in self._state.channels or self._state.look(name).config != config:
                self.configure(name, **msgspec.structs.asdict(config))

    def close(self) -> None:
        """Lets go of the journal; calls after this raise `PoolClosed`."""
        with self._compacting, self._lock:
            self._closed = self._closed or "the pool was closed"
            self._wake_all()
            try:
                if self._journal is not None:
                    self._journal.close()
            finally:
                self._state.let_go()
        self._rewriter.shutdown(wait=False)
        self._room_maker.shutdown(wait=False)
        if self._syncer is not None:
            self._syncer.shutdown()

    def __enter__(self) -> DataPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call ------------------------------------------------------------------------------------------------------

    def execute(self, operation: Operation[Any], then: Callable[[Any], Any] | None = None) -> Any:
        if isinstance(operation, Upkeep):
            self._upkeep(operation)
            return then(None) if then is not None else None
        until = _until(operation)
        if (steps := operation.steps()) is not None:
            steps.prepare()  # with the lock held it would keep everyone waiting
        while True:
            woken = threading.Event()
            answer, serial, wake_at = self._attempt_fully(operation, woken.set)
            if wake_at is None:
                if self._journal is not None:
                    self._journal.wait(serial)
                if self._must_erase(operation):
                    self._erase()
                self._compact_when_due()
                return then(answer) if then is not None else answer
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                self._forget_waiter(operation, woken.set)
                answer = _gave_up(operation, pieces=False)
                return then(answer) if then is not None else answer
            woken.wait(_soonest(left, self._time.until(wake_at)))
            self._forget_waiter(operation, woken.set)

    async def execute_async(
        self, operation: Operation[Any], then: Callable[[Any], Any] | None = None, *, pieces: bool = False
    ) -> Any:
        """`execute`, awaited; no call takes a thread. With `pieces`, a wait that timed out is answered `PENDING`."""
        loop = asyncio.get_running_loop()
        if isinstance(operation, Upkeep):
            await self._in(self._rewriter, self._upkeep, operation)
            return then(None) if then is not None else None
        until = _until(operation)
        while True:
            woken = asyncio.Event()

            def wake(event: asyncio.Event = woken) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

            answer, serial, wake_at = await self._attempt_fully_async(operation, wake)
            if wake_at is None:
                safe = self._made_safe(loop, serial)
                try:
                    made = then(answer) if then is not None else answer  # while the disk is busy
                finally:
                    if safe is not None:
                        await self._wait_until_safe(operation, answer, safe)
                if self._must_erase(operation):
                    await self._in(self._rewriter, self._erase)
                self._compact_when_due()
                return made
            try:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    answer = _gave_up(operation, pieces=pieces)
                    return then(answer) if then is not None else answer
                try:
                    # Not `wait_for`: in Python 3.11 it forgets a cancellation that comes together with the wake-up.
                    async with asyncio.timeout(_soonest(left, self._time.until(wake_at))):
                        await woken.wait()
                except TimeoutError:
                    pass
            finally:
                self._forget_waiter(operation, wake)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[..., Any], *args: Any) -> Any:
        """Does what may have to wait for a backup or a compaction, in one of the threads for that."""
        if self._closed is not None:
            raise PoolClosed(self._closed)
        return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

    def _attempt_fully(self, operation: Operation[Any], wake: Callable[[], None]) -> tuple[Any, int, float | None]:
        """`_attempt`; what it needs of the journal is read first, or room made in it, with the lock free."""
        made_room = False
        loaded: list[LoadedPayloads] = []
        try:
            while True:
                compactions = self._compactions
                try:
                    return self._attempt(operation, wake)
                except MustLoad as needed:
                    self._put(loaded, read_payloads(needed.records, needed.blobs))
                except DiskFull:
                    if made_room or not self._make_room(compactions):
                        raise
                    made_room = True
        finally:
            self._take_out(loaded)

    async def _attempt_fully_async(
        self, operation: Operation[Any], wake: Callable[[], None]
    ) -> tuple[Any, int, float | None]:
        """The same, awaited. The attempt itself is never left half-way: a batch is handed out in it."""
        loop = asyncio.get_running_loop()
        made_room = False
        loaded: list[LoadedPayloads] = []
        try:
            while True:
                compactions = self._compactions
                try:
                    return self._attempt(operation, wake)
                except MustLoad as needed:
                    self._put(loaded, await loop.run_in_executor(None, read_payloads, needed.records, needed.blobs))
                except DiskFull:
                    if made_room or not await self._in(self._room_maker, self._make_room, compactions):
                        raise
                    made_room = True
        finally:
            self._take_out(loaded)

    def _put(self, loaded: list[LoadedPayloads], payloads: LoadedPayloads) -> None:
        """Has payloads in memory for the call that asked for them."""
        loaded.append(payloads)
        with self._lock:
            payloads.put()

    def _take_out(self, loaded: list[LoadedPayloads]) -> None:
        """The call is over: an answer that was made has them, and the pool goes on without them."""
        if loaded:
            with self._lock:
                for payloads in loaded:
                    payloads.take_out()

    def _attempt(self, operation: Operation[Any], wake: Callable[[], None]) -> tuple[Any, int, float | None]:
        """(answer, serial to wait for, None), or, where the call must wait, `wake` registered and when to try again."""
        operation.check()
        with self._lock:
            if self._closed is not None:
                raise PoolClosed(self._closed)
            now = self._now()
            concerned = operation.concerned(self._state)
            self._state.touch(concerned)
            self._settle(concerned, now, late=isinstance(operation, Read))
            try:
                if isinstance(operation, Change):
                    answer = self._change(operation, now)
                    self._settle(concerned, now, late=True)
                else:
                    assert isinstance(operation, Read)
                    answer = operation.read(self._state, now)
                    if isinstance(operation, ReadStats):
                        answer |= self.describe()
            except MustWait:
                name = operation.channel  # type: ignore[attr-defined]  # whatever waits, waits for a channel
                self._waiters.setdefault(name, {})[wake] = None
                return None, 0, self._next_deadline(name)
            finally:
                self._state.sweep()  # once the answer is made; a call that only looks may have found something due
                self._notify()
            return answer, self._journal.serial - 1 if self._journal is not None else 0, None

    def _change(self, operation: Change[Any], now: float) -> Any:
        """Plans, writes the facts down and applies them; the answer."""
        plan = operation.plan(self._state, now)
        while plan.again:
            self._commit(plan.facts, plan.block)
            plan = operation.plan(self._state, now)
        self._commit(plan.facts, plan.block)
        return plan.after() if plan.after is not None else plan.reply

    def _next_deadline(self, name: str) -> float:
        """When the clock alone may have something for who waits for a channel."""
        scored = self._state.scored
        deadlines = [self._state.look(name).deadline(), scored.deadline() if scored.serving == name else None]
        return min((deadline for deadline in deadlines if deadline is not None), default=float("inf"))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        for name, channel in self._state.touched.items():
            if channel.changed:
                channel.changed = False
                for wake in self._waiters.pop(name, ()):
                    wake()
        self._state.touched.clear()
        if self._state.closed != self._was_closed:
            self._was_closed = self._state.closed
            self._wake_all()  # also those who wait for a channel that never came to be

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for wake in waiters:
                wake()
        self._waiters.clear()

    def _forget_waiter(self, operation: Any, wake: Callable[[], None]) -> None:
        with self._lock:
            waiters = self._waiters.get(operation.channel, {})
            waiters.pop(wake, None)
            if not waiters:
                self._waiters.pop(operation.channel, None)  # names that nobody waits for would add up

    def _made_safe(self, loop: asyncio.AbstractEventLoop, serial: int) -> asyncio.Future[None] | None:
        """Done once the commit is as safe as promised, None where it is; a thread of the pool's own waits for the
        disk. Where no thread can be started, the event loop waits for it."""
        if self._journal is None or self._journal.durable(serial):
            return None
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1, "headrace-sync")
        # A sync that has not begun is for all that is written by then: who comes meanwhile shares it.
        shared = self._next_sync
        if shared is None or shared.loop is not loop:
            shared = self._next_sync = _Sync(loop)  # before it is handed over: it may begin at once
            try:
                shared.done = loop.run_in_executor(self._syncer, self._sync_written, shared)
            except BaseException as error:
                if self._next_sync is shared:
                    self._next_sync = None  # who comes next must not wait for what never began
                if not isinstance(error, RuntimeError | MemoryError):
                    raise
                log.warning("no thread could be started to sync the journal (%r): the event loop waits for it", error)
                self._journal.wait(serial)
                return None
        return shared.done

    def _sync_written(self, sync: _Sync) -> None:
        """Makes all that is written safe, in the thread that waits for the disk."""
        assert self._journal is not None
        if self._next_sync is sync:
            self._next_sync = None  # before it is looked how far it goes: who comes from now on needs another
        self._journal.wait(self._journal.serial - 1)

    async def _wait_until_safe(self, operation: Operation[Any], answer: Any, safe: asyncio.Future[None]) -> None:
        """Waits until what a call wrote is safe. A batch is not lost because its caller gives up meanwhile: one of
        scored groups goes back, and a fetch, which may be without a lease, is answered all the same."""
        try:
            await asyncio.shield(safe)
        except asyncio.CancelledError:
            if isinstance(operation, FetchBatch) and answer is not None:
                await asyncio.shield(safe)
                return
            if isinstance(operation, TakeScoredBatch) and answer is not None:
                self._attempt(NackScoredBatch(answer.lease), lambda: None)
            raise

    def _must_erase(self, operation: Operation[Any]) -> bool:
        """Whether a call may be answered only once nothing that was forgotten stands in the journal."""
        erases = isinstance(operation, ForgetTrajectory) and operation.erase
        return erases and self._journal is not None and self._unerased

    def _upkeep(self, operation: Upkeep) -> None:
        if isinstance(operation, BackUpJournal):
            self._back_up(Path(operation.to))
        else:
            self._compact_now()

    def describe(self) -> dict[str, Any]:
        """How safe this pool is, and how many calls wait in it, for `stats()`."""
        journal = self._journal
        return {
            "waiting": sum(map(len, self._waiters.values())),
            "durability": self.durability,
            "journal": str(journal.directory) if journal is not None else None,
            "journal_bytes": journal.bytes if journal is not None else 0,
            **self._payload_bytes(),
        }

    def _payload_bytes(self) -> dict[str, int]:
        """Of steps' arrays and blobs: those in memory, and those that are read from the journal when needed."""
        return {"memory_bytes": self._state.memory.used, "in_journal_bytes": self._state.memory.in_journal}


class _Sync:
    """A sync of the journal that several calls of one event loop wait for."""

    __slots__ = ("done", "loop")

    done: asyncio.Future[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop


def _until(operation: Operation[Any]) -> float | None:
    """When a call that waits gives up; None: never."""
    timeout = getattr(operation, "timeout", None)
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InvalidInput(
            f"timeout must be a number of seconds of at least 0, or None to wait for ever, not {shown(timeout)}"
        )
    return time.monotonic() + timeout


def _gave_up(operation: Operation[Any], *, pieces: bool) -> Any:
    """The answer of a call whose wait timed out; a remote caller that waits in pieces gets `PENDING` and asks again."""
    assert isinstance(operation, Change)
    return PENDING if pieces else operation.gave_up()


def _soonest(left: float | None, until_deadline: float) -> float | None:
    times = [t for t in (left, until_deadline) if t is not None and t != float("inf")]
    return min(max(0.0, min(times)), LONGEST_WAIT_S) if times else None


def _memory_bytes(limits: Limits, journal: Any) -> int | None:
    """Bytes of payloads kept in memory; None: all of them. `InvalidInput` for a bound that nothing can keep."""
    if journal is None:
        if limits.memory_mb is not None:
            raise InvalidInput(
                f"memory_mb is {shown(limits.memory_mb)}, and the pool has no journal that the rest could wait in: "
                "give it one, or leave memory_mb out; without one, its channels' max_queue_size and overflow bound it"
            )
        return None
    return int((DEFAULT_MEMORY_MB if limits.memory_mb is None else limits.memory_mb) * 1e6)


def _durability(given: str | None, journal: Any) -> Durability:
    durability = given or ("memory" if journal is None else "fsync")
    choice(durability, Durability, "durability")
    if (durability == "memory") != (journal is None):
        raise InvalidInput(
            f"durability {durability!r} with journal {shown(journal)}: `memory` takes no journal, "
            "`os` and `fsync` need one"
        )
    return durability  # type: ignore[return-value]
