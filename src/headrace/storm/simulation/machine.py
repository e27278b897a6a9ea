"""The machine that the pool is on: its clock, its disk, and the pool's process, which is started, killed, ended and
started again. The pool in it is the real one, on a journal, and answers calls as its servers do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from headrace.data.errors import HeadraceError
from headrace.pool.config import Durability, Limits
from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalDamaged
from headrace.pool.service import CallerGone, answer
from headrace.storm.simulation.disk import SimulatedDisk, SimulatedFiles
from headrace.storm.simulation.scheduler import ProcessEnded, SimulatedLoop, SimulatedScheduler

#: How the pool's process can end by force: alone, or with its machine.
Failure = Literal["kill", "power"]
#: What the wall clock says when a simulation begins: 2026, in seconds.
EPOCH_S = 1_790_000_000.0
#: Seconds until a process that ended is started again: at least, and on average more.
START_S, START_MORE_S = 0.2, 2.0
#: Seconds until a pool that could not be opened, for want of room, is opened again.
OPEN_AGAIN_S = 1.0
#: MB of a segment, and of payloads in memory: so little that segments end, and payloads are read back, all the time.
SEGMENT_MB, MEMORY_MB = 0.03, 0.004
#: Seconds between two looks at whether a process has ended.
LOOK_S = 0.01
#: Turns of the event loop in which a task that is cancelled must end: some ask twice.
TURNS_TO_END = 20


class Machine:
    """`channels`: the pool's, with their options. `on_up`: called each time the pool has been opened."""

    def __init__(
        self,
        folder: Path,
        scheduler: SimulatedScheduler,
        loop: SimulatedLoop,
        chance: random.Random,
        channels: dict[str, dict[str, Any]],
        durability: Durability,
        on_up: Callable[[], None],
    ) -> None:
        self._scheduler, self._loop, self._chance = scheduler, loop, chance
        self._channels, self._durability, self._on_up = channels, durability, on_up
        self.disk = SimulatedDisk(folder, scheduler, chance)
        self.clock_ahead_s = 0.0  # by how much the wall clock was set
        self.boot = 1
        self.failures: tuple[Failure, ...] = ("kill",)  # what may happen to it while it starts
        self.powered = True
        self.served = 0  # calls that reached the pool
        self.opened = 0  # times that the pool was
        self.died: str | None = None
        self.pool: DataPool | None = None
        self._files = SimulatedFiles(self.disk)
        self._tasks: dict[asyncio.Task[None], None] = {}  # calls that are being answered, oldest first
        self._connections: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._upkeep: set[asyncio.Task[None]] = set()
        self.up = asyncio.Event()

    def wall(self) -> float:
        return EPOCH_S + self._scheduler.now + self.clock_ahead_s

    def boot_id(self) -> bytes:
        return self.boot.to_bytes(16, "big")

    # -- the process ---------------------------------------------------------------------------------------------------

    def start(self, *, failure: Failure | None = None, after: int = 0) -> None:
        """Starts the pool's process; with a `failure` it ends after so many calls to its disk, be it opened or not."""
        self.powered = True
        files = self._files = SimulatedFiles(self.disk)
        if failure is not None:
            self.fail_within(failure, after)
        self._loop.spawn(lambda: self._open(files), "start")

    def _open(self, files: SimulatedFiles) -> None:
        """The beginning of the pool's process, in a thread."""
        while not files.ended:
            try:
                pool = DataPool(
                    self.disk.journal,
                    durability=self._durability,
                    channels=self._channels,
                    limits=Limits(memory_mb=MEMORY_MB),
                    segment_mb=SEGMENT_MB,
                    clock=self.wall,
                    monotonic=lambda: self._scheduler.now,
                    files=files,
                )
                self._loop.call_soon_threadsafe(self._serve_from_now, pool, files)
                return
            except JournalDamaged as error:
                return self._die(error)
            except HeadraceError:
                self._scheduler.sleep(OPEN_AGAIN_S)
            except Exception as error:
                return self._die(error)

    def _serve_from_now(self, pool: DataPool, files: SimulatedFiles) -> None:
        if files is self._files and not files.ended:
            self.pool = pool
            self.opened += 1
            self.up.set()
            self._on_up()

    def shown(self, error: BaseException) -> str:
        """An error in words that are the same in every run: without the name of a folder that is not."""
        return f"{type(error).__name__}: {error}".replace(str(self.disk.journal), "JOURNAL")[:300]

    def _die(self, error: Exception) -> None:
        self.died = self.shown(error)
        self._loop.call_soon_threadsafe(self.up.set)

    def fail_within(self, failure: Failure, calls: int) -> None:
        """Has the process end by force in the middle of what it does to its disk, so many calls from now."""
        self._files.fail_within(calls, lambda: self._fail(failure))

    def _fail(self, failure: Failure) -> None:
        """The process ends by force, now: nothing of it goes on."""
        if not self._files.ended:
            self._files.ended = True
            self.up.clear()
            self.pool = None
            self._loop.call_soon_threadsafe(self._bury, failure, self._files)

    def _bury(self, failure: Failure, files: SimulatedFiles) -> None:
        self._keep(self._restart(failure, files))

    async def fail(self, failure: Failure) -> None:
        """Ends the process by force."""
        self._fail(failure)
        await asyncio.sleep(0)

    async def _restart(self, failure: Failure, files: SimulatedFiles) -> None:
        self.powered = failure != "power"
        await self._end_work(files)
        if failure == "power":
            self.boot += 1
            self.disk.lose_power()
        await self._start_later()

    async def _start_later(self) -> None:
        chance = self._chance
        await asyncio.sleep(START_S + chance.expovariate(1 / START_MORE_S))
        if chance.random() < 0.15:  # it is killed again while it starts
            self.start(failure=chance.choice(self.failures), after=chance.randrange(40))
        else:
            self.start()

    async def _end_work(self, files: SimulatedFiles) -> None:
        """Ends the threads and the calls of a process that is gone."""
        self._loop.kill_threads()
        files.end()
        connections, self._connections = self._connections, []
        for lose, _ in connections:
            lose()
        for _ in range(TURNS_TO_END):
            left = [end_calls() for _, end_calls in connections]
            for task in list(self._tasks):
                task.cancel()
            if not self._tasks and not any(left):
                break
            await asyncio.sleep(0)

    async def restart(self) -> None:
        """Ends the process as an upgrade does, and starts it again."""
        pool, files = self.pool, self._files
        if pool is None:
            return
        self.up.clear()
        self.pool = None
        closed = False

        def close() -> None:
            nonlocal closed
            with contextlib.suppress(HeadraceError):
                pool.close()
            closed = True

        self._loop.spawn(close, "close")
        while not closed and not files.ended:
            await asyncio.sleep(LOOK_S)
        if not files.ended:  # it was not killed meanwhile
            files.ended = True
            await self._end_work(files)
            await self._start_later()

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._upkeep.add(task)
        task.add_done_callback(self._upkeep.discard)

    async def close(self) -> None:
        """Ends everything, as by a kill."""
        self._files.ended = True
        await self._end_work(self._files)
        self.disk.delete()

    def accept(self, lose: Callable[[], None], end_calls: Callable[[], bool]) -> None:
        """Takes in a connection: with the process goes what it carries, by `lose`, and the calls that came over it, by
        `end_calls`, which says whether any is left."""
        self._connections.append((lose, end_calls))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def serve(self, body: bytes, gone: asyncio.Event, reply: Callable[[bytes], None], lost: Callable[[], None]) -> None:
        """Answers a call that arrived: `reply` is called with the answer, or, where the process ends before and its
        machine does not, `lost`."""
        pool, files = self.pool, self._files
        assert pool is not None
        self.served += 1

        async def work() -> None:
            try:
                data, _ = await answer(pool, body, gone.wait)
            except CallerGone:
                return
            except (ProcessEnded, asyncio.CancelledError):
                data = b""
            if not files.ended:
                reply(data)
            elif self.powered:
                lost()

        task = self._loop.create_task(work())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
