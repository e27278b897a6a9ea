"""Steps that are handed out one by one (`unit="step"`), and what becomes of the groups that they are taken from.

A group of which a step is out by itself is broken: no fetch of groups takes it until all such steps are back. It is
consumed when its last step is.
"""

from __future__ import annotations

from sortedcontainers import SortedList

from headrace.pool.channel_index import ChannelIndex
from headrace.pool.groups import GroupState, TrajectoryState, is_quarantined


class SingleSteps(ChannelIndex):
    """The part of a channel that hands out single steps."""

    def offered(self) -> SortedList:
        """Steps that a `unit="step"` fetch may take, as (created_at, group, trajectory, index)."""
        if self.single_steps is None:
            self.single_steps = SortedList()
            for trajectory in self.trajectories.values():
                for index in trajectory.tree.records:
                    self._offer(trajectory, index)
        return self.single_steps

    def _offer(self, trajectory: TrajectoryState, index: int) -> None:
        record = trajectory.tree.records[index]
        taken = (trajectory.leased_steps or set()) | (trajectory.consumed or set())
        if self.single_steps is None or index in taken or trajectory.group.lease or is_quarantined(record):
            return
        if self.config.require_reward and record.head.reward is None:
            return
        entry = (record.head.created_at, trajectory.group.seq, trajectory.uid, index)
        if entry not in self.single_steps:
            self.single_steps.add(entry)
            self.changed = True

    def _withdraw(self, group: GroupState, only: TrajectoryState | None = None) -> None:
        if self.single_steps is not None:
            for trajectory in (only,) if only else group.trajectories.values():
                for index, record in trajectory.tree.records.items():
                    self.single_steps.discard((record.head.created_at, group.seq, trajectory.uid, index))

    def _lease_step(self, trajectory: TrajectoryState, index: int) -> None:
        group = trajectory.group
        group.broken = True
        self.dequeue(group)
        if trajectory.leased_steps is None:
            trajectory.leased_steps = set()
        trajectory.leased_steps.add(index)
        trajectory.deliver(index)
        group.queued -= 1
        group.leased += 1
        self.ledger.queued -= 1
        self.ledger.leased += 1
        if self.single_steps is not None:
            head = trajectory.tree.records[index].head
            self.single_steps.discard((head.created_at, group.seq, trajectory.uid, index))

    def _consume_step(self, trajectory: TrajectoryState, index: int) -> None:
        group = trajectory.group
        if trajectory.leased_steps is None or index not in trajectory.leased_steps:
            return
        trajectory.leased_steps.discard(index)
        if trajectory.consumed is None:
            trajectory.consumed = set()
        trajectory.consumed.add(index)
        group.leased -= 1
        self.ledger.leased -= 1
        self.ledger.consumed += 1
        if group.seq in self.groups:
            self._add_waiting_again(group)
        self._end_if_consumed(group)

    def _return_leased_steps(self, trajectory: TrajectoryState) -> None:
        if not trajectory.leased_steps:
            return
        group, n = trajectory.group, len(trajectory.leased_steps)
        trajectory.leased_steps.clear()
        group.leased -= n
        group.queued += n
        self.ledger.leased -= n
        self.ledger.queued += n
        if not group.leased:
            self.add_waiting(group)
            self._schedule_timeout(group)
            self._rejoin(group)

    def _rejoin(self, group: GroupState) -> None:
        """A group of which every step that was handed out by itself is back is a group again."""
        if group.broken and not any(other.leased_steps or other.consumed for other in group.trajectories.values()):
            group.broken = False
            self.update_ready(group)

    def _end_if_consumed(self, group: GroupState) -> None:
        """A group whose steps all went one by one, and whose trajectories all ended, is consumed."""
        done = not group.queued and not group.leased and len(group.counted) >= self.need(group)
        if done and self._all_counted(group) and group.seq in self.groups:
            group.consumed = True
            self._end_group(group, "consumed")
