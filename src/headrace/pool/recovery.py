"""Recovery of a channel: putting it back together from a snapshot, and setting it right where commits were lost.

A snapshot brings the ledger whole: restoring counts no step again. In a journal that was never repaired, the rules for
lost commits do nothing.
"""

from __future__ import annotations

from heapq import heappush

from headrace.data.block import Record, StepHead
from headrace.pool.channel import Channel
from headrace.pool.groups import DAMAGED, OPEN, GroupState, Lease, TrajectoryState, reconcile

# -- from a snapshot ---------------------------------------------------------------------------------------------------


def restore_step(channel: Channel, trajectory: TrajectoryState, record: Record) -> None:
    """Takes a step of a group in a snapshot in."""
    trajectory.tree.add(record)
    group, head = trajectory.group, record.head
    if not group.consumed:
        for blob in record.blobs:
            blob.uses += 1
    head.trajectory_uid, head.prompt_uid = trajectory.uid, group.uid
    gone = trajectory.consumed is not None and head.step_index in trajectory.consumed
    if channel.note_step(trajectory, record) or gone or group.consumed:
        return
    group.queued += 1


def restore_group(channel: Channel, group: GroupState, counted: tuple[str, ...], *, opened: bool) -> None:
    """Takes a group in: among the living, or among those kept for replay and for lost answers."""
    channel.next_seq = max(channel.next_seq, group.seq + 1)
    group.counted = counted
    for uid in counted:
        group.trajectories[uid].counted = True
    if group.consumed:
        channel.restoring[group.seq] = group
        return
    channel.trajectories.update(group.trajectories)
    channel.insert_group(group, opened=opened)
    channel.update_ready(group, end_empty=False)  # it may be under a lease that is yet to be read
    channel.note_version(group, group.oldest)
    if channel.config.grace_s:
        for trajectory in group.trajectories.values():
            if trajectory.last != OPEN and not trajectory.counted:
                heappush(channel.grace_deadlines, (trajectory.completed_at + channel.config.grace_s, trajectory.uid))


def restore_lease(channel: Channel, lease: Lease) -> None:
    """Puts a lease back; the memory of a hand-out has no id."""
    if not lease.id:
        return
    channel.leases[lease.id] = lease
    channel.count_lease(lease.id)
    heappush(channel.lease_deadlines, (lease.deadline, lease.id))
    for group in lease.groups:
        channel.dequeue(group)
        group.lease = lease.id
        group.leased, group.queued = group.queued, 0
        if channel.open_groups.get(group.uid) is group:
            del channel.open_groups[group.uid]
    for trajectory, index in lease.steps:
        channel.dequeue(trajectory.group)
        if trajectory.leased_steps is None:
            trajectory.leased_steps = set()
        trajectory.leased_steps.add(index)
        trajectory.group.queued -= 1
        trajectory.group.leased += 1


# -- where commits were lost -------------------------------------------------------------------------------------------


def fits(channel: Channel, head: StepHead) -> bool:
    """Whether a step that was taken can stand here: what it builds on is there, and its place is free."""
    trajectory = channel.trajectories.get(head.trajectory_uid)
    if trajectory is None:
        return head.base < 0
    records = trajectory.tree.records
    return head.step_index not in records and (head.base < 0 or head.base in records)


def lose(channel: Channel, steps: int) -> None:
    """Counts steps that were taken and are lost."""
    channel.ledger.submitted += steps
    channel.ledger.dropped[DAMAGED] += steps


def end_leases_of(channel: Channel, group: GroupState) -> None:
    """Ends leases whose end was lost: what comes next says that the group is free."""
    for lease in list(channel.leases.values()):
        if group in lease.groups or any(trajectory.group is group for trajectory, _ in lease.steps):
            channel.give_back(lease)


def count_steps(channel: Channel) -> tuple[int, int]:
    """Steps queued and leased, by what is there."""
    groups = channel.groups.values()
    return sum(group.queued for group in groups), sum(group.leased for group in groups)


def settle(channel: Channel, submitted: int, consumed: int, live: int) -> tuple[int, int]:
    """Sets the ledger by what it said behind a hole, and by what is there. How many steps were lost, and how many at
    least are queued again though they had gone: nothing says any more which."""
    ledger = channel.ledger
    ledger.queued, ledger.leased = count_steps(channel)
    here = ledger.queued + ledger.leased
    gone = ledger.consumed + ledger.quarantined + sum(ledger.dropped.values())
    found = reconcile(submitted, consumed, here=here, gone=gone, known_consumed=ledger.consumed)
    ledger.submitted = found.submitted
    ledger.consumed += found.consumed
    if found.lost:
        ledger.dropped[DAMAGED] += found.lost
    return found.lost, max(0, here - live)


def recount(channel: Channel, queued: int, leased: int) -> int:
    """Sets the ledger by what is there; how many steps of it were lost."""
    ledger = channel.ledger
    lost = ledger.queued + ledger.leased - queued - leased
    ledger.queued, ledger.leased = queued, leased
    if lost > 0:
        ledger.dropped[DAMAGED] += lost
    else:
        ledger.submitted -= lost  # their arrival was lost, they were not
    return lost
