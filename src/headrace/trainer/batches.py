"""Batches from the pool for the trainer: leased, scored, converted to examples, the next one fetched while this one is
learned from; and the pool's client, which retries while the pool does not answer.

A lease is extended for as long as its batch is held. What was learned from before, in this process or before a resume,
and is handed out again because its lease ran out before it was acknowledged, is skipped: no trajectory is learned from
twice.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.data.sequence import Sequence
from headrace.data.trajectory import Group, Trajectory
from headrace.pool.batch import Batch
from headrace.pool.errors import LeaseLost, PoolClosed, PoolUnreachable
from headrace.pool.remote import RemotePool
from headrace.trainer.checkpoint import LeaseFile
from headrace.trainer.config import TrainerConfig
from headrace.trainer.environments import RunRegistration
from headrace.trainer.examples import Examples, examples_of
from headrace.trainer.reporting import RunWatcher
from headrace.trainer.stopping import (
    Outage,
    Stopped,
    StopSignal,
    TaskThread,
)

log = logging.getLogger(__name__)

#: Seconds between two tries at a pool that does not answer: the second comes soon, for a connection that was lost.
RETRY_DELAYS_S = (0.05, 0.2, 0.5, 1.0)
#: Seconds that a call which ends a run (an acknowledgement, a batch given back) may take: the end waits for it, and a
#: busy machine takes a while to answer.
LAST_CALL_S = 5.0
ENDING_CALLS = frozenset({"ack", "nack", "desk_end"})


class RetryingPool:
    """Calls the pool's methods by name. Returns the pool's answer; raises the pool's refusals, `PoolUnreachable` after
    `patience_s` without an answer, and `Stopped` where the run is stopped first.

    The pool given must not retry by itself. Every call can be repeated safely: a fetch has a request id, and the others
    are idempotent.
    """

    def __init__(self, pool: Any, outage: Outage, stop: StopSignal, patience_s: float) -> None:
        self.pool, self.outage = pool, outage
        self._stop, self._patience_s = stop, patience_s
        # An ended channel is told in answers; that a pool is closed, by its process on the way out.
        self._down = (PoolUnreachable, PoolClosed) if isinstance(pool, RemotePool) else PoolUnreachable
        self._worker = TaskThread("headrace-pool")

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call from the main thread, which a stop ends at once even where the pool hangs; one of `ENDING_CALLS` is
        still tried for `LAST_CALL_S`."""
        if self._stop.is_set() and self.outage.is_down:
            raise Stopped
        future = self._worker.submit(lambda: self.inline(name, *args, **kwargs))
        return self._stop.result(future, grace_s=LAST_CALL_S if name in ENDING_CALLS else 0.0)

    def inline(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A call in the calling thread, which must be one that nothing waits for."""
        if name == "fetch_batch":
            kwargs.setdefault("request_id", uuid.uuid4().hex)
        tries = 0
        while True:
            try:
                found = getattr(self.pool, name)(*args, **kwargs)
            except self._down as error:
                reason = unreachable_reason(error)
                down_s = self.outage.failed(reason)
                if down_s > self._patience_s:
                    raise PoolUnreachable(f"{self.outage.what} did not answer for {down_s:.0f} s: {reason}") from error
                if self._stop.wait(RETRY_DELAYS_S[min(tries, len(RETRY_DELAYS_S) - 1)]):
                    raise Stopped from None
                tries += 1
            else:
                self.outage.answered()
                return found

    def close(self) -> None:
        self._worker.close()


def unreachable_reason(error: Exception) -> str:
    """The reason why a pool did not answer, in the system's words: `connection refused`."""
    lost = error.__cause__
    refused = lost.__cause__ if lost is not None else None
    return refused.strerror.lower() if isinstance(refused, OSError) and refused.strerror else str(lost or error)


#: Seconds that one wait in the pool lasts; between two, a stop is noticed, and it is told how far the batch is.
FETCH_WAIT_S = 0.5
#: Seconds that a fetch under way is waited for when the run ends, so that its batch can be given back: one wait in the
#: pool and an answer. Where it takes longer, the lease runs out, or a resumed run gives the batch back.
LAST_FETCH_S = 2.0


class Labeller(Protocol):
    """Adds to sequences what somebody else thinks of their tokens."""

    def labelled(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences with their labels, in the same order. Raises `Stopped` where the run is stopped first."""


class Scorer(Protocol):
    """Computes rewards for trajectories that have none."""

    def scores(self, trajectories: Iterable[Trajectory]) -> dict[str, float]:
        """Rewards by trajectory uid, of those that could be scored. Raises `Stopped` where the run is stopped first."""


@dataclass
class FetchedBatch:
    """A batch as examples, with what it was fetched under."""

    examples: Examples
    lease_id: str
    trajectories: list[str]
    #: Ready groups that stay behind in the pool.
    queue: int
    #: Groups that this run had learned from already.
    repeated: int
    #: Groups that were consumed before and come from the channel's history.
    replayed: int
    #: From when to when the pool had too little, and from when to when the batch was made into examples.
    starved: tuple[float, float]
    converted: tuple[float, float]


class BatchFeed:
    """The batches of one run. One thread fetches and converts, another extends leases; the methods are the main
    thread's. `close` gives back what was not learned from."""

    def __init__(
        self,
        pool: RetryingPool,
        config: TrainerConfig,
        leases: LeaseFile,
        repeats: Iterable[str] = (),
        scorer: Scorer | None = None,
        *,
        teacher: Labeller | None = None,
        stop: StopSignal,
        watcher: RunWatcher,
        registration: RunRegistration,
    ) -> None:
        self._registration = registration
        self._pool, self._config, self._leases, self._scorer = pool, config, leases, scorer
        self._stop, self._watcher, self._teacher = stop, watcher, teacher
        self._channel = config.pool.channel
        #: Trajectories that were learned from and will be handed out again.
        self.repeats = set(repeats)
        self._held: list[str] = []
        #: The id of the fetch under way, which is on disk before the pool can hand anything out for it.
        self._request = ""
        #: What was taken and not acknowledged yet, by lease: it comes again where the lease runs out.
        self._taken: dict[str, list[str]] = {}
        #: Leases on nothing but what was taken before: they end when a checkpoint holds it.
        self._repeat_leases: list[str] = []
        #: What was passed over since it had been learned from, by lease: it is a repeat until that is acknowledged.
        self._passed_over: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._worker = TaskThread("headrace-feed")
        self._prefetched: Future[FetchedBatch | None] | None = None
        self._keeper = threading.Thread(target=self._extend_leases, name="headrace-leases", daemon=True)
        self._keeper.start()

    def begin(self) -> None:
        """Begins to fetch the batch that `next` will return, where that has not begun."""
        self._prefetched = self._prefetched or self._worker.submit(self._fetch)

    def next(self, *, last: bool = False, publishing: Future[Any] | None = None) -> FetchedBatch | None:
        """The next batch; None once the channel is shut down and has too little. `last`: no other is prefetched. Raises
        `Stopped` where the run is stopped first, and the error of `publishing` where the publish failed: without
        servers no batch would come."""
        self.begin()
        assert self._prefetched is not None
        fetched = self._stop.result(self._prefetched, unless=publishing)
        self._prefetched = (
            self._worker.submit(self._fetch) if self._config.pool.prefetch and not last and fetched else None
        )
        return fetched

    def ack(self, leases: Mapping[str, list[str]]) -> None:
        """Acknowledges batches that are in a checkpoint. Where a lease was lost, its trajectories are remembered and
        skipped when they come again."""
        with self._lock:
            again, self._repeat_leases = self._repeat_leases, []
        lost: list[str] = []
        for lease, trajectories in {**leases, **{lease: [] for lease in again}}.items():
            try:
                self._pool.call("ack", lease, channel=self._channel)
            except LeaseLost as error:
                lost.append(str(error))
                with self._lock:  # what it passed over stays among them
                    self.repeats.update(trajectories)
                    self._passed_over.pop(lease, None)
            else:
                with self._lock:
                    self.repeats -= self._passed_over.pop(lease, set())
            self._taken.pop(lease, None)
            self._record_lease(lease, held=False)
        if lost:
            log.warning("%d batches were not ours any more when they were acknowledged: %s", len(lost), lost[0])

    def close(self) -> None:
        """Gives back what was fetched and not learned from, where the pool answers. The run must have been stopped."""
        self._closed.set()
        try:
            self._keeper.join(LAST_FETCH_S)
            if self._prefetched is not None and not self._pool.outage.is_down:
                wait_for([self._prefetched], timeout=LAST_FETCH_S)
                fetched = (
                    self._prefetched.result()
                    if self._prefetched.done() and self._prefetched.exception() is None
                    else None
                )
                if fetched is not None:
                    self._give_back(fetched.lease_id)
        finally:
            self._worker.close()

    def recover(self, learned: Mapping[str, list[str]]) -> None:
        """Ends the leases of the process before a resume: acknowledges what its checkpoint learned from, gives back the
        rest, and the batch that may have been handed out to a fetch whose answer it did not live to see."""
        held, request = self._leases.read()
        self._held = held
        if request:
            unseen: Batch | None = self._pool.call("fetch_batch", **self._wanted(timeout=0, request=request))
            if unseen is not None:
                self._record_lease(str(unseen.lease_id), held=True)
        for lease in list(self._held):
            if lease not in learned:
                self._give_back(lease)
        self.ack(learned)

    # -- in the background ---------------------------------------------------------------------------------------------

    def _fetch(self) -> FetchedBatch | None:
        wanted = self._config.pool
        starved = (0.0, 0.0)
        while True:
            asked = time.monotonic()
            batch = self._take(timeout=0)
            if batch is None:  # so there was none when it was asked for
                while batch is None:
                    if self._stop.is_set():
                        return None
                    batch = self._take(timeout=FETCH_WAIT_S)
                    if batch is None and not self._wait_on():
                        batch = self._take(timeout=0)  # what came between the two questions is handed out still
                        if batch is None:
                            return None
                starved = (asked, self._handed_out_at(batch))
            began = time.monotonic()
            groups = self._not_learned_from(batch)
            if not groups:
                with self._lock:
                    self._repeat_leases.append(str(batch.lease_id))
                continue
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            self._taken[str(batch.lease_id)] = [trajectory.uid for trajectory in trajectories]
            try:
                scores = self._scored(trajectories)
                examples = examples_of(groups, self._config.algorithm, self._config.max_length, scores)
                if self._teacher is not None:
                    examples.sequences = self._teacher.labelled(examples.sequences)
            except Stopped:
                self._give_back(str(batch.lease_id))
                return None
            queue = self._pool.inline("stats", wanted.channel)["groups"]["ready"]
            return FetchedBatch(
                examples=examples,
                lease_id=str(batch.lease_id),
                trajectories=[trajectory.uid for trajectory in trajectories],
                queue=queue,
                repeated=len(batch) - len(groups),
                replayed=sum(group.replayed for group in groups),
                starved=starved,
                converted=(began, time.monotonic()),
            )

    def _handed_out_at(self, batch: Batch) -> float:
        """When the pool handed a batch out that has just come, by our monotonic clock, where the machines' clocks
        agree."""
        assert batch.deadline is not None
        on_its_way = time.time() - (batch.deadline - self._config.pool.lease_s)
        return time.monotonic() - max(on_its_way, 0.0)

    def _wait_on(self) -> bool:
        """Reports how much of the next batch is ready; False where the channel is shut down and no more will come."""
        self._registration.keep()
        stats = self._pool.inline("stats", self._channel)
        ready, incomplete = stats["groups"]["ready"], stats["groups"]["queued"] - stats["groups"]["ready"]
        wanted = f"{ready} of {self._config.pool.batch_size} groups ready in channel {self._channel}"
        self._watcher.groups(f"{wanted}, {incomplete} incomplete" if incomplete else wanted)
        return not stats["closed"]

    def _scored(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Rewards by the scorer; a stop ends the wait for them."""
        scorer = self._scorer
        return self._stop.call(lambda: scorer.scores(trajectories)) if scorer is not None else {}

    def _take(self, timeout: float) -> Batch | None:
        if not self._request:
            with self._lock:
                self._request = uuid.uuid4().hex
                self._leases.write(self._held, self._request)
        batch: Batch | None = self._pool.inline("fetch_batch", **self._wanted(timeout, self._request))
        if batch is not None:
            self._request = ""
            self._record_lease(str(batch.lease_id), held=True)
        return batch

    def _wanted(self, timeout: float, request: str) -> dict[str, Any]:
        """What is asked of the pool's `fetch_batch`."""
        wanted = self._config.pool
        return {
            "batch_size": wanted.batch_size,
            "n_rollouts": wanted.n_rollouts,
            "channel": wanted.channel,
            "order": wanted.order,
            "max_staleness": wanted.max_staleness,
            "lease_s": wanted.lease_s,
            "timeout": timeout,
            "request_id": request,
        }

    def _not_learned_from(self, batch: Batch) -> list[Group]:
        """The groups of a batch that were not learned from before; notes the others as passed over."""
        groups: list[Group] = []
        passed_over: set[str] = set()
        for group in batch.groups:
            if self._was_learned_from(group):
                passed_over.update(trajectory.uid for trajectory in group.trajectories)
            else:
                groups.append(group)
        if passed_over:
            with self._lock:
                self._passed_over[str(batch.lease_id)] = passed_over
        return groups

    def _was_learned_from(self, group: Group) -> bool:
        """Whether a group was learned from before; replays of the channel's history do not count."""
        uids = {trajectory.uid for trajectory in group.trajectories}
        if group.replayed:
            return False
        if any(not uids.isdisjoint(taken) for taken in list(self._taken.values())):
            return True
        with self._lock:
            return not uids.isdisjoint(self.repeats)

    # -- leases --------------------------------------------------------------------------------------------------------

    def _record_lease(self, lease: str, *, held: bool) -> None:
        with self._lock:
            if held:
                self._held.append(lease)
            elif lease in self._held:
                self._held.remove(lease)
            self._leases.write(self._held, self._request)

    def _give_back(self, lease: str) -> None:
        try:
            self._pool.call("nack", lease, channel=self._channel)
        except LeaseLost:
            pass  # it went back by itself
        except (Stopped, PoolUnreachable):
            if not self._stop.is_set():
                raise
            log.warning("a batch could not be given back: its lease runs out, or --resume gives it back")
            return
        self._taken.pop(lease, None)
        with self._lock:
            self._passed_over.pop(lease, None)
        self._record_lease(lease, held=False)

    def _extend_leases(self) -> None:
        every = self._config.pool.lease_s / 3
        lost: set[str] = set()
        while not self._closed.wait(every):
            for lease in [lease for lease in self._held if lease not in lost]:
                try:
                    self._pool.inline("extend", lease, self._config.pool.lease_s, channel=self._channel)
                except LeaseLost as error:
                    lost.add(lease)  # told once: nothing brings it back
                    log.warning("a lease could not be prolonged: %s", error)
                except (Stopped, PoolUnreachable):
                    break  # why is told where it is waited for
                except Exception as error:  # such as a full disk: the next round tries again
                    log.warning("a lease could not be prolonged yet: %s: %s", type(error).__name__, error)
