"""Channels in a snapshot, when a journal is opened: what the facts do that `headrace.pool.capture` made of them.

A snapshot brings the ledger whole: restoring counts no step again. The scored groups' part is in
`headrace.pool.scored.snapshot`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from heapq import heappush

from headrace.data.block import Block, Record
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.groups import OPEN, FailedTrajectory, GroupState, Lease, Tombstone, TrajectoryState, is_quarantined
from headrace.pool.state import State


def _channel_image(state: State, channel: Channel, fact: f.ChannelImage, block: Block | None) -> None:
    channel.config = fact.config
    channel.version = fact.version
    channel.closed = fact.closed
    channel.next_seq = fact.next_seq
    channel.next_lease = fact.next_lease
    ledger = channel.ledger
    for name in ("submitted", "queued", "leased", "consumed", "quarantined"):
        setattr(ledger, name, fact.ledger[name])
    ledger.dropped = Counter(fact.ledger["dropped"])
    ledger.counts = Counter(fact.ledger["counts"])
    state.next_cursor = max(state.next_cursor, fact.ledger["cursor"])
    channel.by_default = fact.by_default
    for uid, reason, prompt, digests in fact.tombstones:
        channel.tombstones[uid] = Tombstone(reason, prompt, digests)
        channel.known_in.add(uid, channel)
    for uid, number, reason, steps, at, quarantined in fact.failed:
        channel.failed[uid] = FailedTrajectory(number, reason, steps, at, quarantined)
    state.version, state.closed = fact.pool_version, fact.pool_closed
    since = fact.expected_since or [fact.at] * len(fact.expected_late)
    for (prompt, missing), at in zip(fact.expected_late, since, strict=True):
        channel.expected_late.expect(prompt, missing, at)
    channel.acked, channel.nacked = OrderedDict.fromkeys(fact.acked), OrderedDict.fromkeys(fact.nacked)


def _group_image(state: State, channel: Channel, fact: f.GroupImage, block: Block | None) -> None:
    assert block is not None
    group = GroupState(fact.prompt, fact.seq, fact.touched)
    group.deliveries, group.partial, group.consumed = fact.deliveries, fact.partial, fact.consumed
    group.broken = fact.broken
    for image in fact.trajectories:
        trajectory = TrajectoryState(image.uid, group)
        trajectory.last, trajectory.completed_at = image.last, image.completed_at
        trajectory.n_rollouts, trajectory.metadata = image.n_rollouts, image.metadata
        trajectory.consumed = set(image.consumed) or None
        trajectory.deliveries = dict(image.deliveries) or None
        group.trajectories[image.uid] = trajectory
    group.seen, group.n, group.oldest = fact.seen, fact.n, fact.oldest
    for record, ids_at, log_probs_at in block.placed_records():
        if record.head.blobs:
            state.attach_blobs(record, block)
        _restore_step(channel, group.trajectories[record.head.trajectory_uid], record)
        state.memory.keep(record, block.place, ids_at, log_probs_at)
    _restore_group(channel, group, fact.counted, opened=fact.open)


def _leases_image(state: State, channel: Channel, fact: f.LeasesImage, block: Block | None) -> None:
    gone = {uid: trajectory for group in channel.restoring.values() for uid, trajectory in group.trajectories.items()}
    trajectories = {**gone, **channel.trajectories}
    leases = []
    for id, deadline, request, groups, steps, replayed in fact.leases:
        lease = Lease(id, deadline, request)
        lease.groups = [channel.groups[seq] for seq in groups if seq in channel.groups]
        lease.groups += [channel.restoring[seq] for seq in groups if seq in channel.restoring]
        lease.steps = [(trajectories[uid], index) for uid, index in steps if _is_whole(trajectories.get(uid), index)]
        lease.replayed = [channel.restoring[seq] for seq in replayed if seq in channel.restoring]
        _restore_lease(channel, lease)
        leases.append(lease)
    for place, at in zip(fact.replies, fact.replied_at or [fact.at] * len(fact.replies), strict=True):
        channel.replies.add(leases[place], at, leased=bool(leases[place].id))
    for seq in fact.history:
        if seq in channel.restoring:
            channel.history[seq] = channel.restoring[seq]
    channel.end_restoring()


def _is_whole(trajectory: TrajectoryState | None, index: int) -> bool:
    """Whether a step is there with all that it needs: behind a hole it may not be, or be quarantined for want of it."""
    record = trajectory.tree.records.get(index) if trajectory is not None else None
    return record is not None and not is_quarantined(record)


def _restore_step(channel: Channel, trajectory: TrajectoryState, record: Record) -> None:
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


def _restore_group(channel: Channel, group: GroupState, counted: tuple[str, ...], *, opened: bool) -> None:
    """Takes a group in: among the living, or among those kept for replay and for lost answers."""
    channel.next_seq = max(channel.next_seq, group.seq + 1)
    group.counted = counted
    for uid in counted:
        group.trajectories[uid].counted = True
    if group.consumed:
        channel.restoring[group.seq] = group
        return
    channel.trajectories.update(group.trajectories)
    for uid in group.trajectories:
        channel.known_in.add(uid, channel)
    channel.insert_group(group, opened=opened)
    channel.update_ready(group, end_empty=False)  # it may be under a lease that is yet to be read
    channel.note_version(group, group.oldest)
    if channel.config.grace_s:
        for trajectory in group.trajectories.values():
            if trajectory.last != OPEN and not trajectory.counted:
                heappush(channel.grace_deadlines, (trajectory.completed_at + channel.config.grace_s, trajectory.uid))


def _restore_lease(channel: Channel, lease: Lease) -> None:
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


APPLY: dict[type, Callable[..., None]] = {
    f.ChannelImage: _channel_image,
    f.GroupImage: _group_image,
    f.LeasesImage: _leases_image,
}
