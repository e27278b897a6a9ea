"""The reward loop: takes what nobody has scored from a pool, scores it, and annotates it there. Agents never wait for
it: they complete their trajectories, and a channel with `require_reward` hands out a group once all of it is annotated.

What the loop knows is in the pool. A loop that is killed at any time loses nothing: what it had in hand is unscored
still, and is scored again. Two loops side by side score some trajectories twice, and the second annotation is as good
as the first. What a person said of a trajectory stays, whatever a model says before or after (`kept`).

A trajectory whose scoring fails for good is quarantined in the pool with the reason: it is counted, and never trained
on; another rollout takes its place in the group. Failing for good means: the reward has retried it as configured, and
it was not merely out of reach. What is out of reach (a judge's server, a reward worker) is waited for, up to
`patience_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.trajectory import Trajectory
from headrace.pool.embedded import DataPool
from headrace.pool.errors import JournalError, NotFound, PoolClosed, PoolUnreachable
from headrace.pool.remote import RemotePool
from headrace.rewards.recorded import SampleReader
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.rewards.worker import RewardWorker

log = logging.getLogger("headrace.rewards")

#: Who a score is from, as the pool notes it.
SOURCE = "model"
#: Why a sample has no score although nothing is wrong with it: whoever scores it cannot be reached.
UNAVAILABLE = "unavailable"
#: Seconds for which one call waits in the pool for something to score: long enough to be no load.
WAIT_S = 20.0
#: Seconds before what could not be reached is tried again, at first and at most.
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
#: Seconds for which a judge or a worker may be out of reach before its samples count as failed. A server of a large
#: model takes ten minutes to come back.
PATIENCE_S = 1800.0
#: Characters of a failure that the pool keeps as the reason of a quarantine.
MAX_REASON_CHARACTERS = 500

T = TypeVar("T")


class RewardLoop:
    """Scores what is unscored in some channels of a pool. `run` goes on until it is cancelled.

    `on`: a `trajectory` gets one reward, at its last step; or each `step` of it gets its own, all of them at once.
    `concurrency` bounds the trajectories that are in hand at a time. `counts` says what came of them: scored, kept (a
    person had spoken), late (it was handed out meanwhile), quarantined; and waited, the tries at what was out of reach.
    """

    def __init__(
        self,
        pool: DataPool | RemotePool,
        worker: RewardWorker,
        reader: SampleReader,
        *,
        channels: Sequence[str],
        on: Literal["trajectory", "step"] = "trajectory",
        concurrency: int = 64,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool.aio
        self._worker = worker
        self._reader = reader
        self._channels = list(dict.fromkeys(channels))
        self._by_step = on == "step"
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._patience_s = patience_s
        self._clock = clock
        self._in_hand: set[tuple[str, str]] = set()
        self.counts: Counter[str] = Counter()
        #: How many trajectories were quarantined, by the reason's short code.
        self.failures: Counter[str] = Counter()

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Scores for ever. `ready` is called once the pool has its channels wait for rewards. Raises what the pool
        refuses, such as a key."""
        for channel in self._channels:
            await self._asked(partial(self._pool.configure, channel, require_reward=True))
        ready()
        try:
            async with asyncio.TaskGroup() as tasks:
                for channel in self._channels:
                    tasks.create_task(self._watch(channel, tasks))
        except* HeadraceError as refused:
            raise refused.exceptions[0] from None

    def told(self) -> dict[str, Any]:
        """What came of all that was taken in hand so far: `counts`, and `failures` by reason."""
        names = ("scored", "kept", "late", "quarantined", "waited")
        return {**{name: self.counts[name] for name in names}, "failures": dict(self.failures)}

    async def _watch(self, channel: str, tasks: asyncio.TaskGroup) -> None:
        """Takes what comes to wait for a reward in hand, in its order, as far as there is room."""
        cursor: str | None = None
        while True:
            await self._room.acquire()
            self._room.release()
            page = await self._asked(partial(self._page, channel, cursor))
            cursor = page["next"]
            for row in page["items"]:
                held = (channel, row["trajectory_uid"])
                if held not in self._in_hand:  # a pool that was opened anew tells from the beginning
                    await self._room.acquire()
                    self._in_hand.add(held)
                    tasks.create_task(self._settle(*held)).add_done_callback(partial(self._settled, held))

    async def _page(self, channel: str, cursor: str | None) -> dict[str, Any]:
        """What waits for a reward in a channel next. A pool that was begun anew without a journal does not know that
        the channel's groups wait for theirs: it is told so before it is asked, and again behind the answer, since a
        client that tries again by itself may have asked two pools."""
        await self._require_rewards(channel)
        page = await self._pool.unscored(channel, limit=self._concurrency, after=cursor, wait_s=WAIT_S)
        await self._require_rewards(channel)
        return page

    async def _require_rewards(self, channel: str) -> None:
        stats = await self._pool.stats(channel)
        if not stats["config"]["require_reward"]:  # each change is an event, and written down
            await self._pool.configure(channel, require_reward=True)

    def _settled(self, held: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._in_hand.discard(held)
        self._room.release()

    async def _settle(self, channel: str, uid: str) -> None:
        """Scores one trajectory and annotates it, or quarantines it."""
        pause = _Pause()
        began: float | None = None
        while True:
            try:
                trajectory = await self._asked(partial(self._pool.trajectory, uid, channel))
            except NotFound:
                return  # consumed, dropped or failed meanwhile
            if trajectory.reward is not None:
                return  # another loop, the agent or a person was faster
            failure = await self._annotated(trajectory)
            if failure is None:
                return
            began = self._clock() if began is None else began
            waits = failure.reason == UNAVAILABLE and failure.again
            if not waits or self._clock() - began >= self._patience_s:
                await self._quarantine(trajectory, failure)
                return
            self.counts["waited"] += 1
            log.warning("trajectory %s is scored later: %s", uid, failure)
            await pause.take()

    async def _annotated(self, trajectory: Trajectory) -> RewardFailure | None:
        """Scores a trajectory and tells the pool; why it could not be scored, else None."""
        try:
            samples = self._reader.samples(trajectory, by_step=self._by_step)
        except RewardFailure as failure:
            return failure
        scores: list[Score] = []
        for found in await self._worker.score(samples):
            if isinstance(found, RewardFailure):
                return found
            scores.append(found)
        try:
            status = await self._asked(partial(self._tell, trajectory, samples, scores))
        except NotFound:
            status = "late"  # it went while it was scored
        except (InvalidInput, TypeError) as error:  # what a source told beside its number cannot be kept
            return RewardFailure(f"the pool refuses its score: {error}", "wrong_type", again=False)
        self.counts["scored" if status == "ok" else status] += 1
        return None

    async def _tell(self, trajectory: Trajectory, samples: list[Sample], scores: list[Score]) -> str:
        uid, channel = trajectory.uid, trajectory.channel
        if not self._by_step:
            (score,) = scores
            return await self._pool.reward(uid, score.value, None, channel, source=SOURCE, info=score.extra_info)
        indices = [sample.step_index or 0 for sample in samples]
        rewards = {index: score.value for index, score in zip(indices, scores, strict=True)}
        info = {index: score.extra_info for index, score in zip(indices, scores, strict=True)}
        told = await self._pool.reward_steps(uid, rewards, channel, source=SOURCE, info=info)
        return next((status for status in ("late", "ok") if status in told.values()), "kept")

    async def _quarantine(self, trajectory: Trajectory, failure: RewardFailure) -> None:
        reason = f"reward: {failure}"[:MAX_REASON_CHARACTERS]
        log.error("trajectory %s is quarantined: %s", trajectory.uid, reason)
        ended = await self._asked(partial(self._pool.fail, trajectory.uid, reason, trajectory.channel, quarantine=True))
        if ended.status != "ok":
            self.counts["late"] += 1  # it was rewarded, handed out or gone meanwhile
            return
        self.counts["quarantined"] += 1
        self.failures[failure.reason] += 1

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        """What the pool answers, however long it is away. What it refuses is raised."""
        pause = _Pause()
        while True:
            try:
                return await call()
            except (PoolUnreachable, PoolClosed, JournalError) as error:
                log.warning("the pool is asked again: %s", error)
            await pause.take()


class _Pause:
    """Waits that grow from `MIN_PAUSE_S` to `MAX_PAUSE_S`."""

    def __init__(self) -> None:
        self._next_s = MIN_PAUSE_S

    async def take(self) -> None:
        now, self._next_s = self._next_s, min(2 * self._next_s, MAX_PAUSE_S)
        await asyncio.sleep(now)
