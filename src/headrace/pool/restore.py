"""Putting a channel back together from a snapshot. The ledger comes whole; nothing here counts a step again."""

from __future__ import annotations

from heapq import heappush

from headrace.data.block import Record
from headrace.pool.channel import Channel
from headrace.pool.entities import OPEN, GroupState, Lease, TrajectoryState


def restore_step(channel: Channel, trajectory: TrajectoryState, record: Record) -> None:
    trajectory.tree.add(record)
    group, head = trajectory.group, record.head
    if not group.consumed:
        for blob in record.blobs:
            blob.uses += 1
    head.trajectory_uid, head.prompt_uid = trajectory.uid, group.uid
    gone = trajectory.consumed is not None and head.step_index in trajectory.consumed
    if channel.note(trajectory, record) or gone or group.consumed:
        return
    group.queued += 1


def restore_group(channel: Channel, group: GroupState, ripe: tuple[str, ...], *, opened: bool) -> None:
    """Takes a group in: among the living, or among those kept for replay and for lost answers."""
    channel.next_seq = max(channel.next_seq, group.seq + 1)
    group.ripe = ripe
    for uid in ripe:
        group.trajectories[uid].ripe = True
    if group.consumed:
        channel.kept[group.seq] = group
        return
    channel.trajectories.update(group.trajectories)
    channel.insert_group(group, opened=opened)
    channel.place(group, bury=False)  # it may be under a lease that is yet to be read
    channel.age(group, group.oldest)
    if channel.config.grace_s:
        for trajectory in group.trajectories.values():
            if trajectory.last != OPEN and not trajectory.ripe:
                heappush(channel.grace_deadlines, (trajectory.completed_at + channel.config.grace_s, trajectory.uid))


def restore_lease(channel: Channel, lease: Lease) -> None:
    """Puts a lease back; the memory of a hand-out has no id."""
    if not lease.id:
        return
    channel.leases[lease.id] = lease
    channel.count_lease(lease.id)
    heappush(channel.lease_deadlines, (lease.deadline, lease.id))
    for group in lease.groups:
        channel.unplace(group)
        group.lease = lease.id
        group.leased, group.queued = group.queued, 0
        if channel.open_groups.get(group.uid) is group:
            del channel.open_groups[group.uid]
    for trajectory, index in lease.steps:
        channel.unplace(trajectory.group)
        if trajectory.given is None:
            trajectory.given = set()
        trajectory.given.add(index)
        trajectory.group.queued -= 1
        trajectory.group.leased += 1
