"""The rollouter: plays the rows of a dataset by a flow, as `RolloutSchedule` says, until all are in the pool.

Every rollout is a task that ends in one of two ways: its trajectory is complete in the pool, or it failed there. Where
that is in doubt (an answer that was lost, a gateway that died, a process before this one that was killed) the gateway
is asked by failing the trajectory: `late` says that it was complete, and it counts; `ok` that it had begun, and it is
played again under its next attempt; `unknown` that it never did. So each rollout is complete once, whoever dies when.

What the pool then does with a complete group is asked for as well: one that it drops before the trainer has used it
(too old, too many, out of time) is replaced.

A gateway that does not answer, or is not ready, holds back new rollouts; those that fail meanwhile are not charged. A
weight sync needs nothing: the gateway holds the agents' calls, and they wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.data.errors import HeadraceError
from headrace.flows.child_gateway import ChildGateway
from headrace.flows.flow import AgentFailed, WorkerLost
from headrace.flows.gateway_client import NOT_NOW, WRONG_KEY, GatewayClient, GatewayRefused, Handle, TrajectoryEnded
from headrace.flows.rollout_state import RolloutStateFile
from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import TRAIN, LostGroup, RolloutStart
from headrace.flows.task import HIDDEN_COLUMNS, Task
from headrace.net.http_answer import NoAnswer

log = logging.getLogger("headrace.flows")

T = TypeVar("T")

#: Seconds between two questions for the version, and whether the gateway is ready.
POLL_S = 0.5
#: Seconds that the gateway may take to answer these before it is taken to be away.
ANSWER_S = 30.0
#: Seconds until it is asked again for what it refused for now, or failed at.
AGAIN_S = 0.5
#: Seconds for which rollouts that run may go on once the rollouter is told to end.
DRAIN_S = 10.0
#: Seconds between two lines of progress.
PROGRESS_S = 10.0
#: Rollouts in doubt that the gateway is asked about at once.
ASKED_AT_ONCE = 32
#: Trajectories whose state is asked for in one question: some 100 kB of answer. Where more wait, they take turns.
STATES_AT_ONCE = 1000
#: Seconds for which the acceptance of groups may stay unsaved: it can be asked for again, and a save costs two fsyncs.
SAVE_S = 1.0
#: States of a trajectory that the trainer has or had, and all that say that it is in the pool or was used.
WITH_TRAINER = frozenset({"leased", "consumed"})
NOT_DROPPED = WITH_TRAINER | {"queued", "failed", "unknown"}


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run of rollouts ended, over all of its processes; `seconds` are this one's.

    `accepted` and `lost` count groups, `dropped` those that the pool dropped before the trainer used them, by its
    reason; `rollouts` and `val_rollouts` those that are complete, `failed` attempts by their reason. `finished`: all
    that was asked for was played.
    """

    finished: bool
    accepted: int
    lost: int
    dropped: dict[str, int]
    rollouts: int
    val_rollouts: int
    failed: dict[str, int]
    retried: int
    versions: list[int]
    validated: list[int]
    gateway_starts: int
    seconds: float


class RolloutPlayer(Protocol):
    """Who plays rollouts, any number at once: a flow (`AgentFlowBase`), or workers elsewhere that have one."""

    async def run(self, task: Task) -> None:
        """Plays a rollout to its end; raises as `AgentFlowBase.run`, and `WorkerLost`."""


class AsyncRollouter:
    """One run. `data` has the rows of each channel, `flow` plays them, and `gateway` is the one that `flow` plays
    through; `child` is its process, where it is the rollouter's own. `say` is given lines of progress.
    """

    def __init__(
        self,
        schedule: RolloutSchedule,
        flow: RolloutPlayer,
        data: Mapping[str, Sequence[Mapping[str, Any]]],
        gateway: GatewayClient,
        file: RolloutStateFile,
        *,
        child: ChildGateway | None = None,
        hidden: Sequence[str] = HIDDEN_COLUMNS,
        prompt: str | None = None,
        poll_s: float = POLL_S,
        drain_s: float = DRAIN_S,
        say: Callable[[str], None] = log.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.schedule = schedule
        self._flow, self._data, self._gateway, self._file, self._child = flow, data, gateway, file, child
        self._hidden, self._prompt = tuple(hidden), prompt
        self._poll_s, self._drain_s, self._say, self._clock = poll_s, drain_s, say, clock
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._paused = False
        self._ready = False
        #: What is being removed on the pool's word, while its watcher looks on.
        self._removals: set[asyncio.Task[None]] = set()
        #: How often the gateway was found away: what failed across one is not charged.
        self._outages = 0
        #: When the state was saved last, and the group that the pool was asked about last.
        self._saved_at = -SAVE_S
        self._asked_last = -1
        #: One thread: an older state must not replace a newer one.
        self._writer = ThreadPoolExecutor(1, "rollout-state")
        self._trouble: Exception | None = None

    # -- from outside --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Starts no more rollouts; those that run go on."""
        self._paused = True

    def resume(self) -> None:
        """Starts rollouts again."""
        self._paused = False
        self._wake.set()

    def stop(self) -> None:
        """Has `run` end: what runs has `drain_s` to end, and is failed then."""
        self._stopping = True
        self._wake.set()

    async def run(self, ready: Callable[[], None] = lambda: None) -> RolloutSummary:
        """Plays until all is played or `stop` is called; `ready` is called when the first rollouts begin. Raises
        `HeadraceError` where the agent fails again and again, the gateway's process cannot be kept running, or it
        refuses the keys. The state is saved however it ends."""
        began = self._clock()
        watchers = [asyncio.create_task(self._watched(work)) for work in (self._watch, self._report, self._guard)]
        try:
            await self._until_ready()
            await self._unless_stopped(asyncio.ensure_future(self._prepare()))
            if not (self._stopping or self._trouble):
                ready()
            await self._play()
        finally:
            await self._end()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        if self._trouble is not None:
            raise self._trouble
        return self._summary(self._clock() - began)

    # -- playing -------------------------------------------------------------------------------------------------------

    async def _play(self) -> None:
        schedule = self.schedule
        while not (self._stopping or self._trouble or schedule.finished):
            self._wake.clear()
            schedule.held = self._paused or not self._ready
            starts = schedule.next(self._clock())
            await self._save()
            for start in starts:
                self._tasks[start.group, start.rollout] = asyncio.create_task(self._rollout(start))
            if schedule.hopeless:
                most = max(schedule.state.failed.items(), key=lambda found: found[1])
                raise HeadraceError(
                    f"{schedule.state.lost_in_a_row} groups failed one after the other, most of all with {most[0]!r}; "
                    "the log tells each, and `headrace pool show` a trajectory's. Correct the agent, or raise "
                    "rollout.max_failed_groups"
                )
            if not starts:
                await self._woken()

    async def _woken(self) -> None:
        """Waits for news, or until a rollout that failed may begin again."""
        wakes_at = self.schedule.wakes_at
        try:
            async with asyncio.timeout(None if wakes_at is None else max(0.0, wakes_at - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _rollout(self, start: RolloutStart) -> None:
        """Plays one attempt, and tells the schedule how it ended."""
        outages = self._outages
        try:
            await self._flow.run(self._task(start))
            await self._accept(start)
        except asyncio.CancelledError:
            await self._abandon(start)
        except TrajectoryEnded as error:
            await self._settle(start, "ended", str(error), outages)
        except AgentFailed as error:
            await self._settle(start, error.reason, str(error), outages, lost=isinstance(error, WorkerLost))
        except (NoAnswer, GatewayRefused) as error:
            if isinstance(error, GatewayRefused) and error.status in WRONG_KEY:
                self._trouble = error
            await self._settle(start, "gateway", str(error), outages)
        except Exception as error:  # a flow's bug is a failure of its rollout, and of no other
            log.exception("the flow failed at %s", start.trajectory_uid)
            await self._settle(start, "crashed", f"{type(error).__name__}: {error}", outages)
        finally:
            self._tasks.pop((start.group, start.rollout), None)
            self._wake.set()

    async def _settle(self, start: RolloutStart, reason: str, detail: str, outages: int, *, lost: bool = False) -> None:
        """Has the gateway know of an attempt that failed, and takes its word where it was complete after all. One that
        was `lost` with who played it is not charged. Where the gateway will never take it, the run ends."""
        log.warning("%s failed: %s", start.trajectory_uid, detail)
        try:
            status = await self._fail(start, start.attempt, detail or reason)
        except asyncio.CancelledError:
            await self._abandon(start)
            return
        except Exception as error:
            if not self._stopping:
                self._trouble = self._trouble or error
            await self._abandon(start)
            return
        if status == "late":
            await self._accept(start)
            return
        charged = self._ready and outages == self._outages and not lost
        await self._give_up(self.schedule.failed(start, reason, self._clock(), charged=charged))

    async def _give_up(self, lost: LostGroup | None) -> None:
        """Ends what is left of a group, where it is lost."""
        if lost is None:
            return
        for other in lost.running:
            if (task := self._tasks.get((other.group, other.rollout))) is not None:
                task.cancel()
        if lost.complete:
            await self._save()  # whoever goes on from here must not take what is removed for complete
        for other in lost.complete:
            await self._remove(other)

    def _give_up_beside(self, lost: LostGroup | None) -> None:
        """The same in a task: whoever watches the gateway must not wait for it."""
        removal = asyncio.create_task(self._give_up(lost))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, start: RolloutStart) -> None:
        """Takes a trajectory of a group that is given up out of the pool, complete or not."""
        try:
            await self._patiently(partial(self._gateway.delete, start.trajectory_uid))
        except HeadraceError as error:
            log.warning("%s stays in a group that is given up: %s", start.trajectory_uid, error)

    async def _accept(self, start: RolloutStart) -> None:
        """A rollout is complete: it counts, unless its group was given up meanwhile."""
        if start.group in self.schedule.state.open:
            self.schedule.accepted(start)
        else:
            await self._abandon(start)

    async def _abandon(self, start: RolloutStart) -> None:
        """A rollout was ended with its group, where it may just have become complete; or with this process: then it
        stays open, for the next one to ask."""
        if start.group not in self.schedule.state.open:
            self.schedule.failed(start, "cancelled", self._clock(), charged=False)
            await self._remove(start)

    async def _prepare(self) -> None:
        """Checks the keys, and settles what a process before this one left open."""
        await self._patiently(self._gateway.check_keys)
        doubtful = self.schedule.in_doubt()
        if doubtful:
            self._say(f"going on: {self.schedule.state.accepted} groups accepted, {len(doubtful)} rollouts in doubt")
        room = asyncio.Semaphore(ASKED_AT_ONCE)

        async def settled(start: RolloutStart) -> None:
            attempt = start.attempt
            async with room:
                while (status := await self._fail(start, attempt, "its rollouter ended")) == "ok":
                    attempt += 1
            if status == "late":
                self.schedule.accepted(msgspec.structs.replace(start, attempt=attempt))
            else:
                self.schedule.resumed(start, attempt)

        await asyncio.gather(*map(settled, doubtful))

    async def _fail(self, start: RolloutStart, attempt: int, reason: str) -> str:
        """What the gateway says to the failure of an attempt: `ok`, `late` or `unknown`."""
        uid = msgspec.structs.replace(start, attempt=attempt).trajectory_uid
        ending = await self._patiently(partial(self._gateway.fail, Handle(uid, start.prompt_uid, ""), reason))
        return ending.status

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """An answer of the gateway, however long it is away or fails at it. Raises `GatewayRefused` where it will not
        answer otherwise, and that or `NoAnswer` once the rollouter ends."""
        told = False
        while True:
            try:
                return await ask()
            except NoAnswer:
                if self._stopping or self._trouble:
                    raise
            except GatewayRefused as error:
                if self._stopping or self._trouble or not (error.status in NOT_NOW or error.status >= 500):
                    raise
                if not told:
                    log.warning("%s; it is asked again until it answers otherwise", error)
                told = True
                await asyncio.sleep(AGAIN_S)

    def _task(self, start: RolloutStart) -> Task:
        return Task(
            row=dict(self._data[start.channel][start.row]),
            prompt_uid=start.prompt_uid,
            rollout=start.rollout,
            n_rollouts=start.n_rollouts,
            channel=start.channel,
            attempt=start.attempt,
            hidden=self._hidden,
            prompt=self._prompt,
        )

    # -- watching ------------------------------------------------------------------------------------------------------

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        """Has the run end where a watcher fails."""
        try:
            await work()
        except Exception as error:
            self._trouble = self._trouble or error
            self._wake.set()

    async def _watch(self) -> None:
        """Asks for readiness, the version and, where rewards come later, for these."""
        while True:
            try:
                await self._look()
            except (NoAnswer, TimeoutError):
                self._away()
            except GatewayRefused as error:
                if error.status in WRONG_KEY:
                    raise
                self._away()
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        async with asyncio.timeout(ANSWER_S):
            if not await self._gateway.ready():
                self._away()
                return
            version = await self._gateway.policy_version(patience_s=0.0)
        waiting = self._to_ask_for()
        uids = [start.trajectory_uid for starts in waiting.values() for start in starts]
        found = await self._gateway.states(TRAIN, uids, patience_s=0.0) if uids else None
        if not self._ready or version != self.schedule.state.version:
            self._wake.set()
        # Both at once: a version alone may stand for groups that wait in the pool again.
        self.schedule.version_is(version)
        self._ready = True
        if found is not None:
            for number, starts in waiting.items():
                self._heard(number, {start: found.rows[start.trajectory_uid] for start in starts})
        self.schedule.waiting_is(0 if found is None else found.ready_groups)
        if self.schedule.behind:
            self._wake.set()

    def _away(self) -> None:
        if self._ready:
            log.warning("the gateway at %s is away or not ready; rollouts wait for it", self._gateway.address)
        self._ready = False
        self._outages += 1

    def _to_ask_for(self) -> dict[int, list[RolloutStart]]:
        """Of the groups that await scores or that the trainer has not used yet, those whose turn it is: a question
        costs no more the more the pool holds."""
        waiting = self.schedule.in_pool()
        found: dict[int, list[RolloutStart]] = {}
        room = STATES_AT_ONCE
        for number in sorted(waiting, key=lambda number: (number <= self._asked_last, number)):
            room -= len(waiting[number])
            if found and room < 0:
                break
            found[number] = waiting[number]
            self._asked_last = number
        return found

    def _heard(self, number: int, rows: Mapping[RolloutStart, Mapping[str, Any]]) -> None:
        """Takes the pool's word on a group: scored, with the trainer, used, dropped, or to be played again in part."""
        schedule = self.schedule
        states = {str(row["state"]) for row in rows.values()}
        dropped = sorted(states - NOT_DROPPED)
        schedule.leased(number, "leased" in states)
        if "failed" in states and number in schedule.state.held:
            dropped.append("failed")  # it was accepted as it was: nothing comes in the place of what failed since
        if states & WITH_TRAINER or states == {"unknown"}:
            schedule.scored(number)
            if "leased" not in states:
                schedule.taken(number)
        elif dropped:
            log.warning("the pool dropped a group before it was learned from (%s); its room is free", dropped[0])
            schedule.dropped(number, dropped[0])
            self._give_up_beside(LostGroup([], [start for start, row in rows.items() if row["state"] == "queued"]))
        elif "failed" in states:
            for start in (start for start, row in rows.items() if row["state"] == "failed"):
                self._give_up_beside(schedule.failed(start, "reward", self._clock()))
        elif number in schedule.state.open and all(row.get("reward") is not None for row in rows.values()):
            schedule.scored(number)
        else:
            return
        self._wake.set()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            state = self.schedule.state
            self._say(
                f"version {state.version}: {state.accepted} groups accepted, {len(state.open)} open, "
                f"{self.schedule.running} rollouts running, {state.retried} retried, {state.lost} groups lost, "
                f"{sum(state.dropped.values())} dropped"
            )

    async def _guard(self) -> None:
        """Keeps the gateway's process running, where it is the rollouter's own."""
        if self._child is not None:
            await self._child.keep()

    async def _until_ready(self) -> None:
        while not (self._ready or self._stopping or self._trouble):
            await self._wake.wait()
            self._wake.clear()

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> None:
        """Waits for work, but no longer than until the rollouter is told to end."""
        work.add_done_callback(lambda _: self._wake.set())
        while not (work.done() or self._stopping or self._trouble):
            await self._wake.wait()
            self._wake.clear()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        else:
            work.result()

    # -- ending --------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Waits for what runs, ends it, and saves the state."""
        self._stopping = True
        if running := [*self._tasks.values(), *self._removals]:
            await asyncio.wait(running, timeout=0.0 if self._trouble else self._drain_s)
        for task in (left := [*self._tasks.values(), *self._removals]):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._save(now=True)
        self._writer.shutdown()

    async def _save(self, *, now: bool = False) -> None:
        """Saves the state where that must not wait, or has waited long enough."""
        schedule = self.schedule
        if now or schedule.changed or (schedule.behind and self._clock() >= self._saved_at + SAVE_S):
            schedule.changed = schedule.behind = False
            self._saved_at = self._clock()
            encoded = msgspec.json.encode(schedule.state)
            await asyncio.get_running_loop().run_in_executor(self._writer, self._file.write, encoded)

    def _summary(self, seconds: float) -> RolloutSummary:
        state = self.schedule.state
        return RolloutSummary(
            finished=self.schedule.finished,
            accepted=state.accepted,
            lost=state.lost,
            dropped=dict(state.dropped),
            rollouts=state.rollouts,
            val_rollouts=state.val_rollouts,
            failed=dict(state.failed),
            retried=state.retried,
            versions=[state.base_version or 0, state.version],
            validated=list(state.validated),
            gateway_starts=0 if self._child is None else self._child.starts,
            seconds=seconds,
        )
