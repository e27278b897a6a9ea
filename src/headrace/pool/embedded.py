"""The pool in this process: the core, its journal, a lock, and those who wait.

A call takes the lock, plans, writes to the journal, applies, and lets go; then it waits until what it wrote is as safe
as promised. So facts reach disk in the order in which they were applied, and nobody waits for a disk with the lock
held. Callers who must wait (an empty queue, a full one) are woken by the call that changes that, or by the channel's
next deadline; nothing polls.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from headrace.data.block import Block
from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.frame import Frame
from headrace.pool import facts as facts_
from headrace.pool import holes, operations
from headrace.pool.aio import AsyncPool
from headrace.pool.calls import Calls
from headrace.pool.config import ChannelConfig, Durability, Limits, choice
from headrace.pool.core import Core
from headrace.pool.errors import DiskFull, JournalError, PoolClosed, PoolFull
from headrace.pool.journal.files import Files
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.records import decode_commit
from headrace.pool.journal.repair import backup
from headrace.pool.journal.snapshot import capture, live_bytes
from headrace.pool.plan import PENDING, MustWait, Plan
from headrace.pool.scored import facts as desk_facts
from headrace.pool.scored.groups import DAMAGED
from headrace.pool.scored.piece_store import ScratchFiles
from headrace.pool.scored.plans import due as desk_due
from headrace.pool.state import State
from headrace.pool.steady import Steady

log = logging.getLogger("headrace.pool")

#: Operations on the journal itself: long, and outside the pool's lock.
UPKEEP = ("compact", "backup")

#: Waits are cut to this: a lock cannot wait for centuries. Who wakes early looks, and waits on.
LONGEST_WAIT_S = 86_400.0
#: A journal smaller than this is not worth rewriting.
COMPACT_FROM = 64_000_000
#: A journal that is full is rewritten where it holds so many times what lives in it.
WORTH_IT = 1.15


class DataPool(Calls):
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
        self.durability = _durability(durability, journal)
        base = defaults if isinstance(defaults, ChannelConfig) else ChannelConfig().changed(dict(defaults or {}))
        self._state = State(base, limits or Limits())
        self._core = Core(self._state)
        self._time = Steady(clock, monotonic or (time.monotonic if clock is time.time else None))
        self._lock = threading.Lock()
        self._waiters: dict[str, set[Callable[[], None]]] = {}
        self._closed: str | None = None
        self._journal: Journal | None = None
        self._about: dict[str, None] = {}  # the channels of the last commit
        self._check_at = COMPACT_FROM
        self._compacting = threading.Lock()
        self._compactions = 0
        self._syncer: ThreadPoolExecutor | None = None
        self.aio: AsyncPool = cast(AsyncPool, _Awaitable(self))
        if journal is not None:
            self._journal = Journal(
                journal, durability=self.durability, segment_mb=segment_mb, quota_mb=quota_mb, files=files
            )
        if self._journal is not None:
            self._state.scored.pieces.scratch = ScratchFiles(self._journal.directory, self._journal.files.write)
        try:
            if self._journal is not None:
                self._recover(self._journal)
            self._adopt(channels or {}, defaults is not None)
        except BaseException:
            self.close()
            raise

    # -- opening and closing -------------------------------------------------------------------------------------------

    def _recover(self, journal: Journal) -> None:
        def take(found: Frame) -> None:
            facts, block = decode_commit(found)
            try:
                self._state.apply(facts, block)
            except Exception as error:
                raise JournalError(
                    f"journal {journal.directory}: commit {found.serial} reads back, but cannot be applied "
                    f"({error!r}). Nothing was changed"
                ) from error
            self._state.sweep()
            self._about = dict.fromkeys([fact.channel for fact in facts])
            self._time.after(max((fact.at for fact in facts), default=0.0))

        collecting = gc.isenabled()
        gc.disable()  # half a million new objects, none of them garbage
        try:
            found = journal.open(take)
        finally:
            if collecting:
                gc.enable()
        if self._state.orphans:
            log.warning("journal %s: facts about what is not there: %s", journal.directory, dict(self._state.orphans))
        if found.commits:
            log.info("journal %s: %d commits recovered", journal.directory, found.commits)
        with self._lock:
            now = self._now()
        if journal.torn is not None:
            log.warning("journal %s: %s", journal.directory, journal.torn)
            self._settle_one(facts_.Cut("", now, journal.torn))
        for name, channel in self._state.channels.items():
            queued, leased = holes.counted(channel)
            if (queued, leased) != (channel.ledger.queued, channel.ledger.leased):
                log.warning(
                    "journal %s: steps of channel %r are lost: the ledger is set right", journal.directory, name
                )
                self._settle_one(facts_.Recounted(name, now, queued, leased))
        if lost := self._state.scored.lost():
            log.warning("journal %s: %d scored groups are lost", journal.directory, len(lost))
            self._settle_one(desk_facts.GroupsDropped("", now, tuple(lost), DAMAGED, "the journal lost it"))

    def _adopt(self, channels: Mapping[str, Mapping[str, Any] | ChannelConfig], with_defaults: bool) -> None:
        """Writes down options that differ from what the journal knew."""
        base = self._state.defaults
        for name, channel in self._state.channels.items() if with_defaults else ():
            if channel.by_default and channel.config != base and name not in channels:
                self._settle_one(facts_.Defaulted(name, self._time.now(), base))
        for name, options in channels.items():
            config = options if isinstance(options, ChannelConfig) else base.changed(dict(options))
            if name not in self._state.channels or self._state.look(name).config != config:
                self._do(
                    "configure", {"channel": name, "options": {k: getattr(config, k) for k in config.__struct_fields__}}
                )

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
        if self._syncer is not None:
            self._syncer.shutdown()

    def __enter__(self) -> DataPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call ------------------------------------------------------------------------------------------------------

    def _do(
        self, op: str, args: dict[str, Any], block: Block | None = None, then: Callable[[Any], Any] | None = None
    ) -> Any:
        if op in UPKEEP:
            return self._upkeep(op, args)
        timeout = _timeout(args)
        until = None if timeout is None else time.monotonic() + timeout
        if block is not None:
            block.prepare()  # with the lock held it would keep everyone waiting
        while True:
            woken = threading.Event()
            compactions = self._compactions
            try:
                answer, serial, wake_at = self._attempt(op, args, block, woken.set)
            except DiskFull:
                if not self._make_room(compactions):
                    raise
                answer, serial, wake_at = self._attempt(op, args, block, woken.set)
            if wake_at is None:
                if self._journal is not None:
                    self._journal.wait(serial)
                if self._must_erase(op, args):
                    self._erase()
                self._compact_when_due()
                return then(answer) if then is not None else answer
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                self._forget_waiter(args["channel"], woken.set)
                return _gave_up(op, args)
            woken.wait(_soonest(left, self._time.until(wake_at)))
            self._forget_waiter(args["channel"], woken.set)

    async def _do_async(
        self, op: str, args: dict[str, Any], block: Block | None = None, then: Callable[[Any], Any] | None = None
    ) -> Any:
        loop = asyncio.get_running_loop()
        if op in UPKEEP:
            await loop.run_in_executor(None, self._upkeep, op, args)
            return then(None) if then is not None else None
        timeout = _timeout(args)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            woken = asyncio.Event()

            def wake(event: asyncio.Event = woken) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

            compactions = self._compactions
            try:
                answer, serial, wake_at = self._attempt(op, args, block, wake)
            except DiskFull:
                if not await loop.run_in_executor(None, self._make_room, compactions):
                    raise
                answer, serial, wake_at = self._attempt(op, args, block, wake)
            if wake_at is None:
                safe = self._made_safe(loop, serial)
                try:
                    made = then(answer) if then is not None else answer  # while the disk is busy
                finally:
                    await self._kept(op, answer, safe)
                if self._must_erase(op, args):
                    await loop.run_in_executor(None, self._erase)
                self._compact_when_due()
                return made
            try:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    nothing = _gave_up(op, args)
                    return then(nothing) if then is not None else nothing
                try:
                    await asyncio.wait_for(woken.wait(), _soonest(left, self._time.until(wake_at)))
                except TimeoutError:
                    pass
            finally:
                self._forget_waiter(args["channel"], wake)

    def _attempt(
        self, op: str, args: dict[str, Any], block: Block | None, wake: Callable[[], None]
    ) -> tuple[Any, int, float | None]:
        """(answer, serial to wait for, None), or, where the call must wait, `wake` registered and when to try again."""
        operations.check(op, args)
        with self._lock:
            if self._closed is not None:
                raise PoolClosed(self._closed)
            now = self._now()
            names = self._concerned(op, args)
            self._settle(names, now, late=op in operations.READS)
            try:
                answer = operations.run(self._core, op, now, args, block)
                while isinstance(answer, Plan) and answer.again:
                    self._commit(answer.facts, answer.block)
                    answer = operations.run(self._core, op, now, args, block)
            except MustWait:
                name = args["channel"]
                self._waiters.setdefault(name, set()).add(wake)
                return None, 0, self._next_deadline(name)
            finally:
                self._notify()
            if isinstance(answer, Plan):
                plan = answer
                self._commit(plan.facts, plan.block)
                answer = plan.after() if plan.after is not None else plan.reply
                self._settle(names, now, late=True)
                self._notify()
                self._state.sweep()
            elif op == "stats":
                answer |= self.describe()
            return answer, self._journal.serial - 1 if self._journal is not None else 0, None

    def _now(self) -> float:
        """The time. Deadlines move with a clock that was set forward. Called with the lock held."""
        now = self._time.now()
        by = self._time.jumped()
        if by and self._state.timed:
            log.info("the clock was set forward, or the pool away, for %.0f s: deadlines move with it", by)
            moved = facts_.ClockMoved("", now, by)
            try:
                self._commit([moved], None)
            except DiskFull as error:
                log.warning("that deadlines moved could not be written down: %s", error)
                self._state.apply([moved], None)
        return now

    def _commit(self, facts: Any, block: Block | None) -> None:
        if not facts:
            return
        facts = [*self._state.begun_by(facts), *facts]
        try:
            if self._journal is not None:
                about = dict.fromkeys([fact.channel for fact in facts])
                self._journal.append(facts, block, self._state.tallies(self._about | about))
                self._about = about
            self._state.apply(facts, block)
        except JournalError:
            raise  # nothing of it was written, and nothing changed
        except BaseException as error:
            # Perhaps on disk, and only half in memory: only a recovery can tell what is true.
            self._closed = f"a fact could not be applied ({error!r}); open the pool again to recover from its journal"
            raise

    def _next_deadline(self, name: str) -> float:
        """When the clock alone may have something for who waits for a channel."""
        desk = self._state.scored
        deadlines = [self._state.look(name).deadline(), desk.deadline() if desk.serving == name else None]
        return min((deadline for deadline in deadlines if deadline is not None), default=float("inf"))

    def _concerned(self, op: str, args: dict[str, Any]) -> list[str]:
        """The channels that a call may look at; an empty name is the desk's."""
        serving = self._state.scored.serving
        if op in operations.AT_DESK:
            return ["", serving] if serving is not None else [""]
        name = args.get("channel")
        if name is None:
            return ["", *self._state.channels]
        return ["", name] if name == serving else [name]

    def _settle(self, names: list[str], now: float, *, late: bool) -> None:
        """Carries out what is due. `late`: what the journal has no room for now may wait for the next call."""
        try:
            for name in names:
                for fact in self._core.due(name, now) if name else desk_due(self._state, now):
                    self._commit([fact], None)
        except JournalError as error:
            if not late:
                raise
            log.warning("what was due could not be written down yet: %s", error)

    def _settle_one(self, fact: facts_.Fact) -> None:
        """Carries out what opening the journal called for; where it is full, so will opening it the next time."""
        with self._lock:
            try:
                self._commit([fact], None)
            except DiskFull as error:
                log.warning("what was found could not be written down yet: %s", error)
                self._state.apply([fact], None)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        for name, channel in self._state.channels.items():
            if channel.changed:
                channel.changed = False
                for wake in self._waiters.pop(name, ()):
                    wake()
        if self._state.closed:
            self._wake_all()  # also those who wait for a channel that never came to be

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for wake in waiters:
                wake()
        self._waiters.clear()

    def _forget_waiter(self, name: str, wake: Callable[[], None]) -> None:
        with self._lock:
            self._waiters.get(name, set()).discard(wake)

    def _made_safe(self, loop: asyncio.AbstractEventLoop, serial: int) -> asyncio.Future[None]:
        """Done once the commit is as safe as promised; a thread of the pool's own waits for the disk."""
        if self._journal is None or self._journal.durable(serial):
            done: asyncio.Future[None] = loop.create_future()
            done.set_result(None)
            return done
        if self._syncer is None:
            self._syncer = ThreadPoolExecutor(1, "headrace-sync")
        return loop.run_in_executor(self._syncer, self._journal.wait, serial)

    async def _kept(self, op: str, answer: Any, safe: asyncio.Future[None]) -> None:
        """Waits until what a call wrote is safe. A batch is not lost because its caller gives up meanwhile: the desk's
        goes back, and a fetch, which may be without a lease, is answered all the same."""
        try:
            await asyncio.shield(safe)
        except asyncio.CancelledError:
            if op == "fetch" and answer is not None:
                await safe
                return
            if op == "desk_batch" and answer is not None:
                self._attempt("desk_nack", {"lease_id": answer.lease}, None, lambda: None)
            raise

    # -- the journal's upkeep ------------------------------------------------------------------------------------------

    def _must_erase(self, op: str, args: dict[str, Any]) -> bool:
        """Whether a call may be answered only once nothing that was forgotten stands in the journal."""
        return op == "forget" and args.get("erase", True) and self._journal is not None and self._state.unerased

    def _erase(self) -> None:
        """Compacts, unless that was done meanwhile: of many that forget at once, one rewrites the journal for all."""
        with self._compacting:
            if self._state.unerased:
                self._compact()

    def _compact_when_due(self) -> None:
        """Starts a compaction where the journal has grown enough, and none is under way."""
        journal = self._journal
        if journal is None or not (journal.bytes > self._check_at or journal.alarm):
            return
        if self._compacting.acquire(blocking=False):
            threading.Thread(target=self._compact_if_worth, name="headrace-compact", daemon=True).start()

    def _compact_if_worth(self) -> None:
        assert self._journal is not None
        try:
            with self._lock:
                live, alarm, self._journal.alarm = live_bytes(self._state), self._journal.alarm, False
                self._check_at = 2 * live + COMPACT_FROM
                worth = self._journal.bytes > self._check_at or (alarm and self._journal.bytes >= WORTH_IT * live)
                worth = worth and self._closed is None
            if worth:
                self._compact()
        except HeadraceError as error:
            log.warning("the journal could not be compacted: %s", error)
        finally:
            self._compacting.release()

    def _make_room(self, compactions: int) -> bool:
        """Compacts a journal that is full, where enough of it is dead; whether that was done, by this call or, since
        there were so many `compactions`, by another."""
        if self._journal is None:
            return False  # it is the desk's scratch files that found no room
        try:
            with self._compacting:
                if self._compactions > compactions:
                    return True
                with self._lock:
                    if self._closed is not None or self._journal.bytes < WORTH_IT * live_bytes(self._state):
                        return False
                self._compact()
                return True
        except HeadraceError as error:
            log.warning("the journal is full and could not be compacted: %s", error)
            return False

    def _upkeep(self, op: str, args: dict[str, Any]) -> None:
        if self._journal is None:
            raise JournalError(f"this pool has no journal to {op}")
        with self._compacting:
            if op == "compact":
                return self._compact()
            with self._lock:
                self._journal.rotate()
            backup(self._journal.directory, Path(args["to"]))

    def _compact(self) -> None:
        journal = self._journal
        assert journal is not None
        with self._lock:
            if self._closed is not None:
                raise PoolClosed(self._closed)
            now = self._now()
            # A segment that nothing was written to since the last try is as good as a new one.
            number = journal.number if journal.empty else journal.rotate(spare=True)
            first_serial = journal.serial
            captured = capture(self._state, now)
            unerased, self._state.unerased = self._state.unerased, False
        try:
            journal.write_snapshot(number, first_serial, captured)
        except BaseException:
            self._state.unerased |= unerased
            raise
        self._compactions += 1

    def describe(self) -> dict[str, Any]:
        """How safe this pool is, and how many calls wait in it, for `stats()`."""
        journal = self._journal
        return {
            "waiting": sum(map(len, self._waiters.values())),
            "durability": self.durability,
            "journal": str(journal.directory) if journal is not None else None,
            "journal_bytes": journal.bytes if journal is not None else 0,
        }


class _Awaitable(Calls):
    """The same calls, awaitable; no thread a call."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool

    def _do(
        self, op: str, args: dict[str, Any], block: Block | None = None, then: Callable[[Any], Any] | None = None
    ) -> Any:
        return self._pool._do_async(op, args, block, then)


def _durability(given: str | None, journal: Any) -> Durability:
    durability = given or ("memory" if journal is None else "fsync")
    choice(durability, Durability, "durability")
    if (durability == "memory") != (journal is None):
        raise InvalidInput(
            f"durability {durability!r} with journal {shown(journal)}: `memory` takes no journal, "
            "`os` and `fsync` need one"
        )
    return durability  # type: ignore[return-value]


def _timeout(args: dict[str, Any]) -> float | None:
    timeout = args.get("timeout")
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0):
        raise InvalidInput(
            f"timeout must be a number of seconds of at least 0, or None to wait for ever, not {shown(timeout)}"
        )
    return timeout


def _gave_up(op: str, args: dict[str, Any]) -> str | None:
    """The answer of a call that waited in vain; a remote caller who waits in pieces is told to ask again."""
    if args.get("pieces"):
        return PENDING
    if op == "submit":
        raise PoolFull(f"channel {args['channel']!r} had no room within {args['timeout']} s; nothing was taken")
    return None


def _soonest(left: float | None, until_deadline: float) -> float | None:
    times = [t for t in (left, until_deadline) if t is not None and t != float("inf")]
    return min(max(0.0, min(times)), LONGEST_WAIT_S) if times else None
