"""What of a channel waits for a reward: complete trajectories without one, or single steps without one.

Both queues are made when they are first asked for, by one pass over what is there, and kept from then on. What is with
a consumer waits for nothing; it is put back, at the end, when it comes back without a reward.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.pool.containers import Item, UnscoredQueue
from headrace.pool.groups import GroupState, TrajectoryState, is_quarantined
from headrace.pool.single_steps import SingleSteps


class Scoring(SingleSteps):
    """The part of a channel that knows what is to be scored."""

    def trajectories_to_score(self) -> UnscoredQueue[str]:
        """The uids of complete trajectories without a reward: of the oldest groups first, then as they come."""
        if self.unscored is None:
            self.unscored = UnscoredQueue()
            for group in sorted(self.groups.values(), key=lambda group: group.seq):
                for trajectory in group.trajectories.values():
                    self.update_unscored(trajectory, ())
        return self.unscored

    def steps_to_score(self) -> UnscoredQueue[tuple[str, int]]:
        """Steps without a reward as (trajectory, index), of running trajectories too; quarantined ones are left out."""
        if self.unscored_steps is None:
            self.unscored_steps = UnscoredQueue()
            for group in sorted(self.groups.values(), key=lambda group: group.seq):
                for trajectory in group.trajectories.values():
                    self.update_unscored(trajectory)
        return self.unscored_steps

    def update_unscored(self, trajectory: TrajectoryState, indices: Iterable[int] | None = None) -> None:
        """Puts a trajectory, and these of its steps or all, where they belong after a change; nowhere, if it has gone
        with the change."""
        if self.trajectories.get(trajectory.uid) is not trajectory:
            return
        if self.unscored is not None:
            _place(self, self.unscored, trajectory.uid, waits=_lacks_reward(trajectory))
        if self.unscored_steps is not None:
            for index in sorted(trajectory.tree.records) if indices is None else indices:
                waits = _step_lacks_reward(trajectory, index)
                _place(self, self.unscored_steps, (trajectory.uid, index), waits=waits)

    def update_unscored_in(self, group: GroupState) -> None:
        """The same for all of a group."""
        for trajectory in group.trajectories.values():
            self.update_unscored(trajectory)


def _place(channel: Scoring, queue: UnscoredQueue[Item], item: Item, *, waits: bool) -> None:
    if not waits:
        queue.discard(item)
    elif queue.add(item):
        channel.changed = True


def _lacks_reward(trajectory: TrajectoryState) -> bool:
    last = trajectory.last
    complete = last >= 0 and len(trajectory.tree) == last + 1
    return complete and not trajectory.rewarded and not trajectory.handed_out(last)


def _step_lacks_reward(trajectory: TrajectoryState, index: int) -> bool:
    record = trajectory.tree.records[index]
    return record.head.reward is None and not is_quarantined(record) and not trajectory.handed_out(index)
