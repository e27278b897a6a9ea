"""How groups and trajectories leave a channel without being used: dropped, failed, trimmed, refused or forgotten.

Each step that goes this way is counted in one column of the ledger, and each trajectory leaves a tombstone.
"""

from __future__ import annotations

from headrace.pool.groups import (
    FAILED,
    FailedTrajectory,
    GroupState,
    Tombstone,
    TrajectoryState,
    is_quarantined,
    quarantined_steps,
)
from headrace.pool.scoring import Scoring


class Dropping(Scoring):
    """The part of a channel that lets go of what nobody uses."""

    def drop(self, group: GroupState, reason: str) -> None:
        """Ends a group that is not leased; its steps are counted as dropped."""
        self.dequeue(group)
        self._expect_late(group)
        self._withdraw(group)
        self.ledger.dropped[reason] += group.queued
        self.ledger.queued -= group.queued
        self.ledger.counts[f"groups_dropped_{reason}"] += 1
        group.queued = 0
        self._end_group(group, reason)

    def drop_trajectory(self, trajectory: TrajectoryState, reason: str, *, quarantine: bool = False) -> None:
        """Takes one trajectory out of its group; its queued steps are dropped with the reason, or quarantined."""
        lost = self.live_steps(trajectory)
        group = trajectory.group
        self._withdraw(group, trajectory)
        self.ledger.queued -= lost
        group.queued -= lost
        if quarantine:
            self.ledger.quarantined += lost
        else:
            self.ledger.dropped[reason] += lost
        self._leave_tombstone(trajectory, reason)
        self._leave(trajectory)
        rest = [r for t in group.trajectories.values() for r in t.tree.records.values() if not is_quarantined(r)]
        group.oldest = None
        self.note_version(group, min((record.head.policy_version for record in rest), default=None))

    def fail(self, trajectory: TrajectoryState, reason: str, at: float, *, quarantine: bool) -> None:
        """Ends a trajectory that failed; its group waits for another in its place. Its steps are dropped, or
        quarantined; those that are out one by one are taken out of their lease, those consumed stay consumed."""
        group, steps = trajectory.group, len(trajectory.tree)
        group.seen -= 1
        self._take_from_leases(trajectory)
        self._return_leased_steps(trajectory)
        self.drop_trajectory(trajectory, FAILED, quarantine=quarantine)
        self.ledger.counts[FAILED] += 1
        number = self.ledger.counts[FAILED]
        self.failed[trajectory.uid] = FailedTrajectory(number, reason, steps, at, quarantine)
        if group.seq in self.groups:
            group.touched = at
            self._rejoin(group)
            if group.broken:
                self._end_if_consumed(group)
        self._enforce_limits()

    def trim(self, group: GroupState) -> None:
        """Makes a group that timed out ready with the trajectories that count; the others are dropped."""
        group.partial = True
        for trajectory in list(group.trajectories.values()):
            if not trajectory.counted:
                self.drop_trajectory(trajectory, "timeout")
        self.update_ready(group)

    def refuse(self, uid: str, prompt: str, steps: int, reason: str) -> None:
        """Counts steps that came too late for their group."""
        self.ledger.submitted += steps
        self.ledger.dropped[reason] += steps
        if uid not in self.tombstones and uid not in self.trajectories:
            self.tombstones[uid] = Tombstone(reason, prompt, b"")
            self.known_in.add(uid, self)
            self.expected_late.arrived(prompt)
            self._enforce_limits()

    def forget(self, uid: str) -> None:
        """Removes a trajectory's content, wherever it is; the uid stays known as forgotten."""
        for group in list(self.history.values()):
            self._strip(group, uid)
            if not group.trajectories:
                del self.history[group.seq]
        for reply in list(self.replies.values()):
            if reply.id not in self.leases and reply.holds(uid):
                self.gone += self.replies.discard(reply)
        trajectory = self.trajectories.get(uid)
        for lease in self.leases.values():
            for group in lease.replayed:
                self._strip(group, uid)
        if trajectory is not None:
            self._take_from_leases(trajectory)
            group = trajectory.group
            if group.leased and group.lease:
                lost = self.live_steps(trajectory)
                group.leased -= lost
                self.ledger.leased -= lost
                self.ledger.dropped["forgotten"] += lost
                self._leave_tombstone(trajectory, "forgotten")
                self._leave(trajectory)
            else:
                self._return_leased_steps(trajectory)
                self.drop_trajectory(trajectory, "forgotten")
        self.tombstones[uid] = Tombstone(
            "forgotten", self.tombstones[uid].prompt if uid in self.tombstones else "", b""
        )
        self.known_in.add(uid, self)
        self.failed.pop(uid, None)

    def _leave(self, trajectory: TrajectoryState) -> None:
        group = trajectory.group
        self._release_trajectory(trajectory)
        self.memory.release(trajectory.tree)
        del group.trajectories[trajectory.uid]
        if trajectory.counted:
            uncount(group, trajectory.uid)
        if not group.trajectories and not group.lease:
            self._remove(group)
        else:
            self.update_ready(group)
            self._schedule_timeout(group)  # it may have been complete until now

    def _strip(self, group: GroupState, uid: str) -> None:
        """Takes a trajectory out of a group that is consumed."""
        trajectory = group.trajectories.pop(uid, None)
        if trajectory is not None:
            self.memory.release(trajectory.tree)
            if uid in group.counted:
                uncount(group, uid)

    def _take_from_leases(self, trajectory: TrajectoryState) -> None:
        """Takes what is out of a trajectory, step by step, out of the leases that hold it."""
        for lease in self.leases.values():
            if any(trajectory is given for given, _ in lease.steps):
                lease.steps = [(given, index) for given, index in lease.steps if given is not trajectory]

    def live_steps(self, trajectory: TrajectoryState) -> int:
        """Steps that can still be trained on: neither quarantined nor consumed one by one."""
        gone = len(trajectory.consumed) if trajectory.consumed else 0
        return len(trajectory.tree) - quarantined_steps(trajectory) - gone


def uncount(group: GroupState, uid: str) -> None:
    """Lets a trajectory count no longer."""
    group.counted = tuple(other for other in group.counted if other != uid)
