"""Where a channel keeps its groups, trajectories and leases, and how it finds them.

It holds that `waiting` has the groups that are not leased, `ready` those of them that a fetch may take, each by age
(`seq`); that every deadline is in its heap; and that a lookup costs the same however long the queue is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeVar

from sortedcontainers import SortedList

from headrace.pool.config import ChannelConfig
from headrace.pool.containers import (
    LATE_WINDOW_S,
    AgeOrderedSet,
    EvictionQueue,
    ExpectedLate,
    RememberedReplies,
    UnscoredQueue,
)
from headrace.pool.groups import (
    DIGEST,
    FULL,
    OPEN,
    FailedTrajectory,
    GroupState,
    Lease,
    Ledger,
    Tombstone,
    TrajectoryState,
    fingerprint,
)
from headrace.pool.payload_memory import PayloadMemory
from headrace.pool.tombstones import Tombstones
from headrace.pool.trajectory_channels import TrajectoryChannels

Key = TypeVar("Key", int, str)

#: Leases that are remembered of those acknowledged, and of those given back: so that either sent again is not refused.
ACKS_KEPT = 1024
#: Steps that a tombstone has a place for and that are missing, beyond as many as are there: a trajectory may have a
#: single step, of any index.
MISSING_KEPT = 64


class ChannelIndex:
    """The containers of a channel, and the ways in which a group moves between them."""

    def __init__(
        self,
        name: str,
        config: ChannelConfig,
        number: int = 0,
        known_in: TrajectoryChannels | None = None,
        memory: PayloadMemory | None = None,
    ) -> None:
        self.name = name
        self.number = number  # of its pool's channels, in the order in which they were begun
        # Of all channels of its pool: who knows which trajectory.
        self.known_in = known_in if known_in is not None else TrajectoryChannels()
        self.memory = memory if memory is not None else PayloadMemory()
        self.config = config
        self.by_default = True  # its options are the pool's defaults
        self.version = 0
        self.closed = False
        self.next_seq = 0
        self.next_lease = 0
        self.first_seq = 0  # no group that lives has a lower number
        self.groups: dict[int, GroupState] = {}
        self.open_groups: dict[str, GroupState] = {}  # by prompt_uid: those that still take trajectories
        self.trajectories: dict[str, TrajectoryState] = {}
        self.waiting = AgeOrderedSet()
        self.ready: dict[int, AgeOrderedSet] = {FULL: AgeOrderedSet()}
        self.leases: dict[str, Lease] = {}
        self.tombstones = Tombstones()
        self.failed: dict[str, FailedTrajectory] = {}  # those of the tombstones whose trajectories failed
        self.expected_late = ExpectedLate()
        self.now = 0.0  # when the newest fact about it happened
        self.history: OrderedDict[int, GroupState] = OrderedDict()
        self.replies = RememberedReplies()
        self.restoring: dict[int, GroupState] = {}  # consumed groups, while a snapshot is read
        self.acked: OrderedDict[str, None] = OrderedDict()  # so that an ack sent again is not refused
        self.nacked: OrderedDict[str, None] = OrderedDict()  # the same for a nack
        self.ledger = Ledger()
        # Deadlines, as heaps whose entries are checked when they come up.
        self.lease_deadlines: list[tuple[float, str]] = []
        self.group_deadlines: list[tuple[float, int]] = []
        self.grace_deadlines: list[tuple[float, str]] = []
        # Made when they are first asked for: most channels never need them.
        self.by_version: list[tuple[int, int]] | None = None
        self.single_steps: SortedList | None = None
        self.eviction: EvictionQueue | None = None
        self.unscored: UnscoredQueue[str] | None = None  # trajectories, by uid
        self.unscored_steps: UnscoredQueue[tuple[str, int]] | None = None
        self.gone: list[GroupState] = []  # since the last `sweep`
        # Hears of a group that is about to change without a fact, while a snapshot is taken.
        self.before_change: Callable[[ChannelIndex, GroupState], None] | None = None
        self.changed = False  # something a blocked caller may wait for has happened

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def late_window_s(self) -> float:
        """How long a trajectory that its group did not wait for is late, and not the first of another."""
        return self.config.group_timeout_s or LATE_WINDOW_S

    def need(self, group: GroupState) -> int:
        """How many trajectories make a group ready."""
        return group.n or self.config.n_rollouts

    def deadline(self) -> float | None:
        """When the clock alone will change something here."""
        heads = [heap[0][0] for heap in (self.lease_deadlines, self.group_deadlines, self.grace_deadlines) if heap]
        return min(heads, default=None)

    def stale_before(self, oldest_allowed: int) -> list[GroupState]:
        """Waiting groups whose oldest step is of a version below `oldest_allowed`, oldest first."""
        if self.by_version is None:
            self.by_version = []
            for seq in self.waiting:
                self.note_version(self.groups[seq], self.groups[seq].oldest)
        found: dict[int, GroupState] = {}
        kept = []
        while self.by_version and self.by_version[0][0] < oldest_allowed:
            entry = heappop(self.by_version)
            group = self.groups.get(entry[1])
            if group is None or group.oldest != entry[0]:
                continue
            if group.lease:
                continue  # comes back into the heap when its lease does
            kept.append(entry)
            if not group.leased:  # some of its steps are out, one by one: it is looked at again when they are back
                found[group.seq] = group
        for entry in kept:  # nothing is dropped yet: a plan that is not carried out must find them again
            heappush(self.by_version, entry)
        return [found[seq] for seq in sorted(found)]

    # -- ready and waiting ---------------------------------------------------------------------------------------------

    def update_ready(self, group: GroupState, *, end_empty: bool = True) -> None:
        """Puts a group where a fetch will find it; one that holds nothing to fetch is ended."""
        if group.leased or group.lease or group.broken or group.consumed or group.seq not in self.groups:
            return self._unready(group)
        counted = len(group.counted)
        full = counted and (group.partial or counted >= (group.n or self.config.n_rollouts))
        bucket = FULL if full else (counted or None)
        if bucket == group.bucket:
            return None
        if group.bucket is not None:
            self._unready(group)
        if bucket is not None:
            if end_empty and not group.queued and bucket == FULL and self._all_counted(group):
                return self._end_group(group, "empty")
            if bucket not in self.ready:
                self.ready[bucket] = AgeOrderedSet()
            self.ready[bucket].add(group.seq)
            group.bucket = bucket
            self.changed = True
        return None

    def _all_counted(self, group: GroupState) -> bool:
        """All that the group wanted has ended and nothing in it can be trained on."""
        return len(group.counted) == len(group.trajectories)

    def _unready(self, group: GroupState) -> None:
        if group.bucket is not None:
            bucket = self.ready[group.bucket]
            bucket.discard(group.seq)
            if not bucket and group.bucket != FULL:
                del self.ready[group.bucket]
            group.bucket = None

    def dequeue(self, group: GroupState) -> None:
        """Takes a group out of all that a fetch, a timeout or an eviction looks at."""
        self._unready(group)
        self.waiting.discard(group.seq)
        if self.eviction is not None:
            self.eviction.discard(group)

    def add_waiting(self, group: GroupState) -> None:
        """Puts a group among those that may time out, grow stale or be dropped."""
        self.waiting.add(group.seq)
        if self.eviction is not None:
            self.eviction.add(group)

    def pick_evicted(self, count: int) -> list[int]:
        """The groups that make room in a full channel."""
        if self.eviction is None:
            waiting = (self.groups[seq] for seq in self.waiting)
            self.eviction = EvictionQueue(waiting, by_owner=self.config.by_owner)
        return self.eviction.pick(count)

    def _add_waiting_again(self, group: GroupState) -> None:
        """The same for a group of which no step is out any more."""
        if not group.leased and group.seq not in self.waiting:
            self.add_waiting(group)
            self._schedule_timeout(group)
            self.note_version(group, group.oldest)

    def _remove(self, group: GroupState) -> None:
        self.dequeue(group)
        if self.groups.pop(group.seq, None) is not None:
            self.changed = True
        if self.open_groups.get(group.uid) is group:
            del self.open_groups[group.uid]

    # -- time and versions ---------------------------------------------------------------------------------------------

    def _schedule_timeout(self, group: GroupState) -> None:
        if self.config.group_timeout_s is not None:
            self._add_deadline(self.group_deadlines, group.touched + self.config.group_timeout_s, group.seq)

    def _add_deadline(self, deadlines: list[tuple[float, Key]], at: float, key: Key) -> None:
        """Notes a deadline. Who already waits must hear of one that is earlier than all before."""
        if not deadlines or at < deadlines[0][0]:
            self.changed = True
        heappush(deadlines, (at, key))

    def move_deadlines(self, seconds: float) -> None:
        """Moves all that waits for a time: the clock was set forward by as much."""
        for group in self.groups.values():
            group.touched += seconds
        for trajectory in self.trajectories.values():
            if trajectory.last != OPEN:
                trajectory.completed_at += seconds
        for lease in self.leases.values():
            lease.deadline += seconds
        self.lease_deadlines = [(at + seconds, key) for at, key in self.lease_deadlines]
        self.group_deadlines = [(at + seconds, key) for at, key in self.group_deadlines]
        self.grace_deadlines = [(at + seconds, key) for at, key in self.grace_deadlines]
        self.expected_late.postpone(seconds)
        self.replies.postpone(seconds)
        self.changed = True

    def note_version(self, group: GroupState, version: int | None) -> None:
        """Has a group count as no younger than the policy version of one of its steps."""
        if version is None:
            return
        if group.oldest is None or version < group.oldest:
            group.oldest = version
        if self.by_version is not None and group.oldest == version:
            heappush(self.by_version, (version, group.seq))

    # -- what is gone --------------------------------------------------------------------------------------------------

    def _end_group(self, group: GroupState, reason: str) -> None:
        """Ends a group: its trajectories become tombstones."""
        for trajectory in group.trajectories.values():
            self._leave_tombstone(trajectory, reason)
            self._release_trajectory(trajectory)
        self._remove(group)
        self.gone.append(group)
        self._enforce_limits()

    def _leave_tombstone(self, trajectory: TrajectoryState, reason: str) -> None:
        records = trajectory.tree.records
        steps = max(records, default=-1) + 1
        if steps == 1:
            digests = fingerprint(records[0])
        elif steps > 2 * len(records) + MISSING_KEPT:
            digests = b""
        else:
            digests = b"".join([fingerprint(records[i]) if i in records else bytes(DIGEST) for i in range(steps)])
        self.tombstones[trajectory.uid] = Tombstone(reason, trajectory.group.uid, digests)

    def _release_trajectory(self, trajectory: TrajectoryState) -> None:
        if self.trajectories.pop(trajectory.uid, None) is not None:
            if trajectory.uid not in self.tombstones:
                self.known_in.discard(trajectory.uid, self)
            for record in trajectory.tree.records.values():
                for blob in record.blobs:
                    blob.uses -= 1
            if self.unscored is not None:
                self.unscored.discard(trajectory.uid)
            if self.unscored_steps is not None:
                for index in trajectory.tree.records:
                    self.unscored_steps.discard((trajectory.uid, index))

    def _expect_late(self, group: GroupState) -> None:
        """Notes how many trajectories a group that closes has not seen: they are late, not the start of another."""
        self.expected_late.expire(self.now, self.late_window_s)
        self.expected_late.expect(group.uid, self.need(group) - group.seen, self.now)

    def _enforce_limits(self) -> None:
        config = self.config
        while len(self.tombstones) > config.tombstones:
            uid, tomb = self.tombstones.pop_oldest()
            if uid not in self.trajectories:
                self.known_in.discard(uid, self)
            self.failed.pop(uid, None)
            self.expected_late.cancel(tomb.prompt)
        while len(self.history) > config.history_size:
            self.gone.append(self.history.popitem(last=False)[1])
        for ended in (self.acked, self.nacked):
            while len(ended) > ACKS_KEPT:
                ended.popitem(last=False)
        self.forget_replies(self.now)

    def forget_replies(self, now: float) -> None:
        """Lets go of hand-outs that nobody will ask for again. No fact: recovery comes to the same by the clock."""
        self.gone += self.replies.expire(now, self.config.replies_kept)

    def end_restoring(self) -> None:
        """Lets go of what a snapshot brought of used groups and nothing in it refers to."""
        self.gone += self.restoring.values()
        self.restoring.clear()

    def let_go(self) -> None:
        """Breaks every cycle: the channel's end."""
        for group in (*self.groups.values(), *self.history.values(), *self.gone):
            group.trajectories.clear()
        for answer in (*self.replies.values(), *self.leases.values()):
            for group in (*answer.groups, *answer.replayed):
                group.trajectories.clear()

    def sweep(self) -> None:
        """Frees the content of groups that are gone and that no retry can ask for.

        Called once a call's answer is made. A group and its trajectories refer to each other: without this, their
        tokens would stay in memory until the garbage collector looks for cycles.
        """
        if not self.gone:
            return
        leased = {id(group) for lease in self.leases.values() for group in lease.all_groups()}
        for group in self.gone:
            # By identity: a group that ends in the middle of a submit leaves its number to what follows of it there.
            here = group is self.groups.get(group.seq) or group is self.history.get(group.seq)
            if not here and id(group) not in leased and not self.replies.holds(group):
                if self.before_change is not None:
                    self.before_change(self, group)
                for trajectory in group.trajectories.values():
                    self.memory.release(trajectory.tree)
                group.trajectories.clear()
        self.gone.clear()
