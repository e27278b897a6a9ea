"""One channel's state, and what facts do to it.

Nothing here decides and nothing here does I/O. It holds that every live step is in exactly one of queued and leased,
and every step ever taken in exactly one column of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop

from headrace.data.block import Record
from headrace.data.step import check_uid
from headrace.pool.config import ChannelConfig
from headrace.pool.dropping import Dropping, uncount
from headrace.pool.groups import OPEN, GroupState, Lease, TrajectoryState, replace_extra


class Channel(Dropping):
    """One channel: its groups, trajectories, leases and ledger, changed by what facts say."""

    # -- configuration -----------------------------------------------------------------------------------------------

    def configure(self, config: ChannelConfig, at: float) -> None:
        """Takes new options over; which trajectories count, deadlines and limits are decided anew by them."""
        self.config = config
        self.group_deadlines.clear()
        for group in self.groups.values():
            self._schedule_timeout(group)
        for trajectory in list(self.trajectories.values()):
            if trajectory.counted and not self._is_complete(trajectory):
                trajectory.counted = False
                uncount(trajectory.group, trajectory.uid)
            self.count_if_complete(trajectory, at)
            self.update_ready(trajectory.group)
        self.single_steps = None
        self.eviction = None
        self._enforce_limits()
        self.changed = True

    def set_version(self, version: int) -> None:
        self.version = version

    # -- growth --------------------------------------------------------------------------------------------------------

    def group_for(self, prompt: str, at: float, number: int | None = None) -> GroupState:
        """The group of that number, or the one that takes trajectories of the prompt; a new one where there is none."""
        group = self.open_groups.get(prompt) if number is None else self.groups.get(number)
        if group is None:
            seq = self.next_seq if number is None else number
            group = self.insert_group(GroupState(prompt, seq, at))
            if seq >= self.next_seq:
                self.next_seq = seq + 1
        return group

    def insert_group(self, group: GroupState, *, opened: bool = True) -> GroupState:
        """Takes in a group that waits; `opened`: it still takes trajectories of its prompt."""
        self.groups[group.seq] = group
        if opened:
            self.open_groups[group.uid] = group
        self.add_waiting(group)
        if self.config.group_timeout_s is not None:
            self._schedule_timeout(group)
        return group

    def open(
        self, uid: str, prompt: str, metadata: bytes, n_rollouts: int | None, at: float, number: int | None = None
    ) -> None:
        """Announces a trajectory, adds to what is known of it, or moves one without steps to the group of `prompt`."""
        trajectory = self.trajectories.get(uid)
        if trajectory is not None and trajectory.group.uid != prompt:
            left = trajectory.group
            left.seen -= 1
            self._leave(trajectory)
            left.n = max((other.n_rollouts or 0 for other in left.trajectories.values()), default=0)
            self.update_ready(left)
            trajectory = None
        if trajectory is None:
            trajectory = self._join(uid, self.group_for(prompt, at, number))
        if metadata:
            trajectory.metadata = metadata
        if n_rollouts is not None:
            trajectory.n_rollouts = n_rollouts
            trajectory.group.n = max(trajectory.group.n, n_rollouts)
        trajectory.group.touched = at
        self.update_ready(trajectory.group)
        self._schedule_timeout(trajectory.group)  # it may wait for more than before

    def append(self, record: Record, at: float, number: int | None = None) -> None:
        """Takes a step in. Every step passes here, and the common one calls little."""
        head, ledger = record.head, self.ledger
        trajectory = self.trajectories.get(head.trajectory_uid)
        if trajectory is None:
            trajectory = self._join(head.trajectory_uid, self.group_for(head.prompt_uid, at, number))
        group = trajectory.group
        head.trajectory_uid, head.prompt_uid = trajectory.uid, group.uid  # one string each, not one a step
        trajectory.tree.add(record)
        for blob in record.blobs:
            blob.uses += 1
        if head.reward is not None:
            trajectory.rewarded = True
        group.touched = at
        ledger.submitted += 1
        if head.extra and self.note_step(trajectory, record):
            ledger.quarantined += 1
        else:
            ledger.queued += 1
            group.queued += 1
            if self.eviction is not None and group.queued == 1:
                self.eviction.filled(group)
            version = head.policy_version
            if group.oldest is None or version < group.oldest or self.by_version is not None:
                self.note_version(group, version)
            if self.single_steps is not None:
                self._offer(trajectory, head.step_index)
        if head.is_last:
            self.end(trajectory, head.step_index, at)
        elif trajectory.last != OPEN:
            self.count_if_complete(trajectory, at)
        if self.unscored is not None or self.unscored_steps is not None:
            self.update_unscored(trajectory, (head.step_index,))
        if group.broken:
            self._end_if_consumed(group)

    def end(self, trajectory: TrajectoryState, last: int, at: float) -> None:
        """Ends a trajectory at the step `last` (-1: without any step)."""
        records = trajectory.tree.records
        if 0 <= trajectory.last != last and trajectory.last in records:
            records[trajectory.last].head.is_last = False
        trajectory.last = last
        if last in records:
            records[last].head.is_last = True
        trajectory.completed_at = at
        self.update_unscored(trajectory, ())
        self.count_if_complete(trajectory, at)

    def count_if_complete(self, trajectory: TrajectoryState, at: float) -> None:
        """Lets a complete trajectory count for its group, once its grace is over."""
        if trajectory.counted or not self._is_complete(trajectory):
            return
        grace = self.config.grace_s
        if grace and at < trajectory.completed_at + grace:
            self._add_deadline(self.grace_deadlines, trajectory.completed_at + grace, trajectory.uid)
            return
        trajectory.counted = True
        group = trajectory.group
        group.counted += (trajectory.uid,)
        self.update_ready(group)
        if group.broken:
            self._end_if_consumed(group)

    def end_graces(self, now: float) -> None:
        """Lets trajectories count whose grace is over. No fact: recovery comes to the same by the clock."""
        graces = self.grace_deadlines
        while graces and graces[0][0] <= now:
            deadline, uid = heappop(graces)
            trajectory = self.trajectories.get(uid)
            # One that ended anew has a later entry: each comes in its own time.
            if trajectory is not None and deadline >= trajectory.completed_at + self.config.grace_s:
                if self.before_change is not None:
                    self.before_change(self, trajectory.group)
                self.count_if_complete(trajectory, now)

    def amend(
        self,
        trajectory: TrajectoryState,
        index: int,
        reward: float | None,
        is_last: bool,
        extra: bytes | None,
        at: float,
    ) -> None:
        """Changes a step that is there: a reward, its end, or its `extra` as a whole."""
        if extra is not None:
            replace_extra(trajectory.tree.records[index], extra)
        if reward is not None:
            self._reward(trajectory, index, reward)
        if is_last:
            self.end(trajectory, index, at)
        else:
            self.count_if_complete(trajectory, at)
        trajectory.group.touched = at

    def score(self, trajectory: TrajectoryState, rewards: Iterable[tuple[int, float, bytes | None]], at: float) -> None:
        """Gives steps that are there their rewards, as (index, reward, extra), before the trajectory may count."""
        for index, reward, extra in rewards:
            if extra is not None:
                replace_extra(trajectory.tree.records[index], extra)
            self._reward(trajectory, index, reward)
        self.count_if_complete(trajectory, at)
        trajectory.group.touched = at

    def _reward(self, trajectory: TrajectoryState, index: int, reward: float) -> None:
        trajectory.tree.records[index].head.reward = reward
        trajectory.rewarded = True
        if self.single_steps is not None:
            self._offer(trajectory, index)
        self.update_unscored(trajectory, (index,))

    # -- hand-out ------------------------------------------------------------------------------------------------------

    def hand_out(self, lease: Lease, leased: bool) -> None:
        """Gives a lease's groups and steps to a consumer: `leased`, or consumed at once."""
        for group in lease.groups:
            self.dequeue(group)
            group.deliveries += 1
            if self.open_groups.get(group.uid) is group:
                del self.open_groups[group.uid]
            self._expect_late(group)
            self._withdraw(group)
            if leased:
                group.lease = lease.id
                self._move(group, leased=True)
                self.update_unscored_in(group)
            else:
                self.consume(group)
        for trajectory, index in lease.steps:
            self._lease_step(trajectory, index)
            self.update_unscored(trajectory, (index,))
            if not leased:
                self._consume_step(trajectory, index)
        if leased:
            self.leases[lease.id] = lease
            self._add_deadline(self.lease_deadlines, lease.deadline, lease.id)
        if lease.request:
            self.gone += self.replies.add(lease, self.now, leased=leased)
        self._enforce_limits()

    def ack(self, lease: Lease) -> None:
        """Consumes what a lease holds."""
        del self.leases[lease.id]
        self.acked[lease.id] = None
        self.replies.discard(lease)
        for group in lease.groups:
            group.lease = ""
            self._move(group, leased=False)
            self.consume(group)
        for trajectory, index in lease.steps:
            self._consume_step(trajectory, index)
        self.gone += (*lease.replayed, *(trajectory.group for trajectory, _ in lease.steps))
        self._enforce_limits()

    def give_back(self, lease: Lease, *, nacked: bool = False) -> None:
        """Ends a lease without an ack: what it holds stands in its old place again. `nacked`: its holder said so, and
        may say so again."""
        del self.leases[lease.id]
        if nacked:
            self.nacked[lease.id] = None
        self.replies.discard(lease)
        for group in lease.groups:
            group.lease = ""
            self._move(group, leased=False)
            if not group.trajectories:  # all of it was forgotten meanwhile
                self._remove(group)
                continue
            if self.open_groups.setdefault(group.uid, group) is group:
                self.expected_late.cancel(group.uid)
            self.update_ready(group)
            self.update_unscored_in(group)
            for trajectory in group.trajectories.values():
                for index in trajectory.tree.records:
                    self._offer(trajectory, index)
            self.note_version(group, group.oldest)
            self._schedule_timeout(group)
        for trajectory, index in lease.steps:
            assert trajectory.leased_steps is not None
            trajectory.leased_steps.discard(index)
            trajectory.group.leased -= 1
            trajectory.group.queued += 1
            self.ledger.leased -= 1
            self.ledger.queued += 1
            self._add_waiting_again(trajectory.group)
            self._offer(trajectory, index)
            self.update_unscored(trajectory, (index,))
            self._rejoin(trajectory.group)
        self.gone += lease.replayed
        self.ledger.counts["redelivered"] += len(lease.groups) + len(lease.steps)
        self.changed = True

    def count_lease(self, id: str) -> None:
        """Keeps the numbers of later leases above this one's."""
        self.next_lease = max(self.next_lease, int(id.rpartition("-")[2]) + 1)

    def extend(self, lease: Lease, deadline: float) -> None:
        lease.deadline = deadline
        self._add_deadline(self.lease_deadlines, deadline, lease.id)

    def consume(self, group: GroupState) -> None:
        """Ends a group whose steps were used; it is kept for replay where the channel has a history."""
        self.ledger.queued -= group.queued
        self.ledger.consumed += group.queued
        group.queued = 0
        group.consumed = True
        self._end_group(group, "consumed")
        if self.config.history_size:
            self.history[group.seq] = group

    # -- trajectories --------------------------------------------------------------------------------------------------

    def _join(self, uid: str, group: GroupState) -> TrajectoryState:
        check_uid(uid, "trajectory_uid")  # calls' were checked before; a journal may say anything
        trajectory = TrajectoryState(uid, group)
        self.trajectories[uid] = group.trajectories[uid] = trajectory
        self.known_in.add(uid, self)
        group.seen += 1
        return trajectory

    def note_step(self, trajectory: TrajectoryState, record: Record) -> bool:
        """Takes over what a record says about its trajectory; true where the step is quarantined."""
        head = record.head
        if head.reward is not None:
            trajectory.rewarded = True
        if not head.extra:
            return False
        seen = head.peek()
        if seen.call_id is not None:
            if trajectory.calls is None:
                trajectory.calls = {}
            trajectory.calls[seen.call_id] = head.step_index
        return seen.quarantined is not None

    def _is_complete(self, trajectory: TrajectoryState) -> bool:
        last = trajectory.last
        if last == OPEN or len(trajectory.tree.records) != last + 1:
            return False
        return trajectory.rewarded or last < 0 or not self.config.require_reward

    def _move(self, group: GroupState, *, leased: bool) -> None:
        n = group.queued if leased else group.leased
        sign = 1 if leased else -1
        group.leased += sign * n
        group.queued -= sign * n
        self.ledger.leased += sign * n
        self.ledger.queued -= sign * n
        if not leased:
            self.add_waiting(group)
