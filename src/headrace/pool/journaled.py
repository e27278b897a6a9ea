"""A pool's state with its journal and its clock: every change is written down first, and found again when the pool is
opened.

A fact is applied once the journal has it. What opening finds lost is set right with facts of its own. The journal is
rewritten, as a snapshot of what lives, when enough of it is dead.

Time is the wall clock's, but never behind what it was before, in this run or an earlier one. A clock that is set back
is followed from there on: facts come one after the other, and a deadline that was ten seconds away stays so. One that
is set forward is followed at once, since people read these times, and every deadline moves by as much. So deadlines go
by the monotonic clock, whatever the other one does.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from headrace.data.block import Block
from headrace.data.errors import HeadraceError
from headrace.data.frame import Frame
from headrace.pool import facts as f
from headrace.pool import policies
from headrace.pool.apply import apply, count_steps
from headrace.pool.capture import Capture, live_bytes
from headrace.pool.errors import DiskFull, JournalError, PoolClosed
from headrace.pool.groups import DAMAGED
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.records import decode_commit
from headrace.pool.journal.repair import backup
from headrace.pool.scored import facts as scored_facts
from headrace.pool.scored.piece_store import ScratchFiles
from headrace.pool.state import State

log = logging.getLogger("headrace.pool")

#: A journal of fewer bytes is not worth rewriting.
COMPACT_FROM_BYTES = 64_000_000
#: A journal that is full is rewritten where it holds so many times the bytes of what lives in it.
COMPACT_RATIO = 1.15
#: Seconds until a compaction that failed is tried again: twice as many after each that fails as well, up to the most.
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 3600.0
#: A full journal is compacted before that where less than this share lives of what lived when it failed: a smaller
#: snapshot may find room, and what could not be read may be gone.
RETRY_RATIO = 0.9
#: Seconds for which a snapshot that is being taken holds the lock at a time: who calls meanwhile waits for as long.
SLICE_S = 0.004
#: Seconds in which those calls get the lock: who lets go of it and takes it again at once leaves nobody else a chance.
BETWEEN_SLICES_S = 0.0005
#: Snapshots in a row that calls may spoil, by giving a channel other options; the one after that is taken at once.
CAPTURES_IN_SLICES = 8
#: Seconds by which the wall clock may get ahead of the monotonic one between two calls without having been set. A clock
#: that is being corrected gently gains half a second in a quarter of an hour.
JUMP_S = 1.0
#: Seconds between two runs that count as time. More of them are a clock that was set, or a pool that was away for long;
#: nothing tells which, and who holds a lease could do nothing about either.
AWAY_S = 60.0


class MonotonicClock:
    """The time by `clock`. `monotonic`: seconds that pass in any case; without it, `clock` is never set forward."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._last = 0.0  # what the clock said last; 0: it was not asked yet
        self._passed = monotonic() if monotonic is not None else 0.0  # what the monotonic one said then
        self._resumed = False  # the clock said that in an earlier run
        self._ahead = 0.0  # by how much this is ahead of the clock
        self._jump = 0.0  # by how much the clock was set forward since `jumped` was called

    def now(self) -> float:
        """Asked by one thread at a time."""
        wall = self._clock()
        gained, most = self._gained(wall), AWAY_S if self._resumed else JUMP_S
        if gained > most:
            back = min(self._ahead, gained)  # it was set back before: that is made up for first
            self._ahead -= back
            self._jump += gained - back
        elif gained < -JUMP_S:
            self._ahead -= gained
        else:
            self._ahead += max(0.0, self._last - wall)
        self._last, self._resumed = wall, False
        return wall + self._ahead

    def _gained(self, wall: float) -> float:
        """Seconds by which the clock got ahead of the monotonic one since it was asked last."""
        if self._monotonic is None:
            return 0.0
        before, self._passed = self._passed, self._monotonic()
        return wall - self._last - (self._passed - before) if self._last else 0.0

    def jumped(self) -> float:
        """By how much the clock was set forward since this was asked last."""
        jump, self._jump = self._jump, 0.0
        return jump

    def after(self, moment: float) -> None:
        """Goes on from a moment of an earlier run."""
        if moment > self._last:
            self._last, self._resumed = moment, True

    def read(self) -> float:
        """The time, by what `now` knows of the clock; asked by any thread."""
        return self._clock() + self._ahead

    def until(self, moment: float) -> float:
        """Seconds to a moment; asked by any thread."""
        return moment - self.read()


class CompactionRetries:
    """When a compaction that failed may be tried again by the pool itself; one that nothing failed before, at once."""

    def __init__(self) -> None:
        self._wait_s = 0.0  # 0: the last one did not fail
        self._next = 0.0
        self._live = 0

    def failed(self, now: float, live: int) -> None:
        """One failed, when so many bytes lived."""
        self._wait_s = min(2 * self._wait_s, LONGEST_RETRY_S) or FIRST_RETRY_S
        self._next, self._live = now + self._wait_s, live

    def succeeded(self) -> None:
        """The next one that fails is the first again."""
        self._wait_s = 0.0

    def due(self, now: float) -> bool:
        """Whether enough time has passed."""
        return not self._wait_s or now >= self._next

    def smaller(self, live: int) -> bool:
        """Whether much less lives than when it failed."""
        return live < RETRY_RATIO * self._live


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for meanwhile: with a long queue that takes longer than a slice of a snapshot may."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _taken(held: list[threading.Lock]) -> threading.Lock | None:
    """What is held, taken out; None where another thread has taken it."""
    try:
        return held.pop()
    except IndexError:
        return None


class JournaledState:
    """The state, the lock that guards it, and the journal that it is written down in, if any."""

    def __init__(self, state: State, journal: Journal | None, clock: MonotonicClock) -> None:
        self._state = state
        self._journal = journal
        self._time = clock
        self._lock = threading.Lock()
        self._closed: str | None = None  # why nothing more can be done
        self._last_channels: dict[str, None] = {}  # those of the last commit
        self._check_at = COMPACT_FROM_BYTES  # when to look whether the journal is worth rewriting
        self._compacting = threading.Lock()
        self._compactions = 0
        self._retries = CompactionRetries()
        self._beside_live = 0  # bytes of the last snapshot beyond what `live_bytes` said
        self._making_room = threading.Lock()  # held by who waits for `_compacting` because the journal is full
        self._backups = 0  # that are under way, or wait for `_compacting`
        self._erasing = False  # something forgotten stands in the journal until a snapshot that was begun is in place
        if journal is not None:
            state.scored.pieces.scratch = ScratchFiles(journal.directory, journal.files.write)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _recover(self, journal: Journal) -> None:
        """Opens the journal and rebuilds the state from it."""

        def take(found: Frame) -> None:
            facts, block = decode_commit(found)
            if block is not None and found.path is not None:
                block.place = journal.place(found.path, found.body_at)
            try:
                apply(self._state, self._replayed(facts), block)
            except Exception as error:
                raise JournalError(
                    f"journal {journal.directory}: commit {found.serial} reads back, but cannot be applied "
                    f"({error!r}). Nothing was changed"
                ) from error
            self._state.sweep()
            self._state.touched.clear()
            self._last_channels = dict.fromkeys([fact.channel for fact in facts])
            self._time.after(max((fact.at for fact in facts), default=0.0))

        with _uncollected():  # half a million new objects, none of them garbage
            found = journal.open(take)
        if self._state.orphans:
            log.warning("journal %s: facts about what is not there: %s", journal.directory, dict(self._state.orphans))
        if found.commits:
            log.info("journal %s: %d commits recovered", journal.directory, found.commits)
        with self._lock:
            now = self._now()
        if journal.torn is not None:
            log.warning("journal %s: %s", journal.directory, journal.torn)
            self._settle_one(f.Cut("", now, journal.torn))
        for name, channel in self._state.channels.items():
            channel.end_restoring()  # where a hole swallowed the snapshot's end
            channel.sweep()
            queued, leased = count_steps(channel)
            if (queued, leased) != (channel.ledger.queued, channel.ledger.leased):
                log.warning(
                    "journal %s: steps of channel %r are lost: the ledger is set right", journal.directory, name
                )
                self._settle_one(f.Recounted(name, now, queued, leased))
        if lost := self._state.scored.lost():
            log.warning("journal %s: %d scored groups are lost", journal.directory, len(lost))
            self._settle_one(scored_facts.GroupsDropped("", now, tuple(lost), DAMAGED, "the journal lost it"))

    def _replayed(self, facts: Sequence[f.Fact]) -> Sequence[f.Fact]:
        """The facts of a commit that is read back, as they are applied; a reader may want more kept than a pool."""
        return facts

    def _settle_one(self, fact: f.Fact) -> None:
        """Carries out what opening the journal called for; where it is full, so will opening it the next time."""
        with self._lock:
            try:
                self._commit([fact], None)
            except DiskFull as error:
                log.warning("what was found could not be written down yet: %s", error)
                apply(self._state, [fact], None)

    # -- changing ------------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The time. Deadlines move with a clock that was set forward. Called with the lock held."""
        now = self._time.now()
        by = self._time.jumped()
        if by and self._state.timed:
            log.info("the clock was set forward, or the pool away, for %.0f s: deadlines move with it", by)
            moved = f.ClockMoved("", now, by)
            try:
                self._commit([moved], None)
            except DiskFull as error:
                log.warning("that deadlines moved could not be written down: %s", error)
                apply(self._state, [moved], None)
        return now

    def _commit(self, facts: Sequence[f.Fact], block: Block | None) -> None:
        if not facts:
            return
        facts = [*self._state.begun_by(facts), *facts]  # refuses one channel too many before anything is written
        try:
            if self._journal is not None:
                channels = dict.fromkeys([fact.channel for fact in facts])
                self._journal.append(facts, block, self._state.tallies(self._last_channels | channels))
                self._last_channels = channels
                if block is not None:
                    block.place = self._journal.last_place()
            apply(self._state, facts, block)
        except JournalError:
            raise  # nothing of it was written, and nothing changed
        except BaseException as error:
            # Perhaps on disk, and only half in memory: only a recovery can tell what is true.
            self._closed = f"a fact could not be applied ({error!r}); open the pool again to recover from its journal"
            raise

    def _settle(self, names: list[str], now: float, *, late: bool) -> None:
        """Carries out what is due. `late`: what the journal has no room for now may wait for the next call."""
        try:
            for name in names:
                for fact in self._due(name, now):
                    self._commit([fact], None)
        except JournalError as error:
            if not late:
                raise
            log.warning("what was due could not be written down yet: %s", error)

    def _due(self, name: str, now: float) -> Iterable[f.Fact]:
        if not name:
            return policies.due_of_scored(self._state.scored, now)
        channel = self._state.channels.get(name)
        return policies.due(channel, now) if channel is not None else ()

    # -- the journal's upkeep ------------------------------------------------------------------------------------------

    def _erase(self) -> None:
        """Compacts, unless that was done meanwhile: of many that forget at once, one rewrites the journal for all."""
        with self._compacting:
            if self._unerased:
                self._compact()

    @property
    def _unerased(self) -> bool:
        """Whether something that was forgotten may still stand in the journal's files."""
        # In this order: a compaction sets the second, then unsets the first.
        return self._state.unerased or self._erasing

    def _compact_when_due(self) -> None:
        """Starts a compaction where the journal has grown enough, none is under way and none failed of late. Where no
        thread can be started, a later call tries again."""
        journal = self._journal
        if journal is None or not (journal.bytes > self._check_at or journal.reserve.alarm):
            return
        if not self._retries.due(self._time.read()):
            return
        if not self._compacting.acquire(blocking=False):
            return
        held = [self._compacting]  # who takes it out lets go of it: a start may fail though the thread is there
        try:
            work = partial(self._compact_if_worth, held)
            threading.Thread(target=work, name="headrace-compact", daemon=True).start()
        except BaseException as error:
            if (compacting := _taken(held)) is not None:
                compacting.release()
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            log.warning("the journal could not be compacted yet: no thread could be started (%r)", error)

    def _compact_if_worth(self, held: list[threading.Lock]) -> None:
        """Compacts, in a thread of its own, unless the call that started it has let go of what it `held`."""
        assert self._journal is not None
        compacting = _taken(held)
        if compacting is None:
            return
        try:
            live = live_bytes(self._state)
            weight = live + self._beside_live
            with self._lock:
                alarm = self._journal.reserve.alarm
                self._journal.reserve.alarm = False
                self._check_at = 2 * weight + COMPACT_FROM_BYTES
                worth = self._journal.bytes > self._check_at or (
                    alarm and self._journal.bytes >= COMPACT_RATIO * weight
                )
                worth = worth and self._closed is None
            if worth:
                self._compact(live)
        except HeadraceError as error:
            log.warning("the journal could not be compacted: %s", error)
        finally:
            compacting.release()

    def _make_room(self, compactions: int) -> bool:
        """Compacts a journal that is full, where enough of it is dead; whether that was done, by this call or, since
        there were so many `compactions`, by another. It waits for a compaction, and not for a backup."""
        if self._journal is None:
            return False  # it is the scratch files of scored groups that found no room
        with self._making_room:
            if self._backups:
                return self._compactions > compactions
            try:
                with self._compacting:
                    if self._compactions > compactions:
                        return True
                    live = live_bytes(self._state)
                    if self._closed is not None or not self._would_make_room(self._journal, live):
                        return False
                    self._compact(live)
                    return True
            except HeadraceError as error:
                log.warning("the journal is full and could not be compacted: %s", error)
                return False

    def _would_make_room(self, journal: Journal, live: int) -> bool:
        """Whether enough of a full journal is dead, and no compaction failed of late in the same state."""
        may = self._retries.due(self._time.read()) or self._retries.smaller(live)
        return may and journal.bytes >= COMPACT_RATIO * (live + self._beside_live)

    def _compact_now(self) -> None:
        self._check_journal("compact")
        with self._compacting:
            self._compact()

    def _back_up(self, to: Path) -> None:
        journal = self._check_journal("backup")
        with self._making_room:  # nobody who wants room gets to wait for what is held until all is copied
            self._backups += 1
        try:
            with self._compacting:
                journal.wait(journal.serial - 1)
                with self._lock:
                    journal.rotate()
                backup(journal.directory, to)
        finally:
            with self._making_room:
                self._backups -= 1

    def _check_journal(self, wanted: str) -> Journal:
        if self._journal is None:
            raise JournalError(f"this pool has no journal to {wanted}")
        return self._journal

    def _compact(self, live: int | None = None) -> None:
        """Writes what lives as a snapshot. Where that fails, the pool waits for a while before it tries again by
        itself. `live`: what `live_bytes` has just said."""
        journal = self._journal
        assert journal is not None
        live = live_bytes(self._state) if live is None else live
        try:
            self._write_snapshot(journal)
        except BaseException:
            self._retries.failed(self._time.read(), live)
            raise
        self._retries.succeeded()
        self._beside_live = max(0, journal.snapshot_bytes - live)
        self._compactions += 1

    def _write_snapshot(self, journal: Journal) -> None:
        """Puts a snapshot in the place of what was written before. Calls go on meanwhile: the lock is held for a slice
        of it at a time."""
        for attempt in count(1):
            self._check_open()
            journal.wait(journal.serial - 1)  # so that the rotation, with the lock held, has little left to sync
            with self._lock, _uncollected():
                self._check_open()
                now = self._now()
                # A segment that nothing was written to since the last try is as good as a new one.
                number = journal.number if journal.empty else journal.rotate(spare=True)
                first_serial = journal.serial
                capture = Capture.begin(self._state, now)
                if self._state.unerased:
                    self._erasing = True
                    self._state.unerased = False  # what is forgotten from now on is in the capture
            try:
                taken = self._take_slices(capture, at_once=attempt > CAPTURES_IN_SLICES)
            finally:
                with self._lock, _uncollected():
                    capture.end()
            if taken:
                journal.write_snapshot(number, first_serial, list(capture.records()))
                self._erasing = False
                break

    def _take_slices(self, capture: Capture, *, at_once: bool) -> bool:
        """Takes a snapshot slice by slice, or with the lock held throughout; False where it was spoiled."""
        while not capture.spoiled:
            with self._lock, _uncollected():
                self._check_open()
                until = time.perf_counter() + SLICE_S
                if capture.take(lambda: at_once or time.perf_counter() < until):  # noqa: B023 - called before the next
                    return True
            time.sleep(BETWEEN_SLICES_S)
        return False

    def _check_open(self) -> None:
        if self._closed is not None:
            raise PoolClosed(self._closed)
