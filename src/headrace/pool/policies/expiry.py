"""What the clock, a new version or a full queue does to a channel: the next fact that is due, if any.

Called before and after every call, so nothing waits for a timer; a caller that blocks wakes for `Channel.deadline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.groups import GroupState


def due(channel: Channel, now: float) -> Iterator[f.Fact]:
    """Facts that the clock, the version or the capacity call for; each is applied before the next is asked for."""
    if channel.grace_deadlines:
        end_graces(channel, now)
    while fact := next_due(channel, now):
        yield fact


def next_due(channel: Channel, now: float) -> f.Fact | None:
    """The first fact that is due: a lease that ran out, a timeout, stale groups, too many groups."""
    return _expired_lease(channel, now) or _timed_out(channel, now) or _stale(channel, now) or _overflow(channel, now)


def end_graces(channel: Channel, now: float) -> None:
    """Lets trajectories count whose grace is over. No fact: recovery comes to the same by the clock."""
    graces = channel.grace_deadlines
    while graces and graces[0][0] <= now:
        deadline, uid = heappop(graces)
        trajectory = channel.trajectories.get(uid)
        if trajectory is not None and deadline >= trajectory.completed_at + channel.config.grace_s:
            channel.count_if_complete(
                trajectory, now
            )  # one that ended anew has a later entry: each comes in its own time


def _expired_lease(channel: Channel, now: float) -> f.Fact | None:
    heap = channel.lease_deadlines
    while heap and heap[0][0] <= now:
        lease = channel.leases.get(heap[0][1])
        if lease is None or lease.deadline > now:
            heappop(heap)
            continue
        return f.Returned(channel.name, now, lease.id, "expired")
    return None


def _timed_out(channel: Channel, now: float) -> f.Fact | None:
    timeout, heap = channel.config.group_timeout_s, channel.group_deadlines
    if timeout is None:
        return None
    while heap and heap[0][0] <= now:
        group = channel.groups.get(heap[0][1])
        if group is None or group.leased or group.lease or _complete(channel, group):
            heappop(heap)
        elif group.touched + timeout > now:
            heappop(heap)
            heappush(heap, (group.touched + timeout, group.seq))
        elif channel.config.on_timeout == "partial" and group.counted and not group.broken:
            return f.Trimmed(channel.name, now, (group.seq,))
        else:
            return f.Dropped(channel.name, now, (group.seq,), "timeout")
    return None


def _complete(channel: Channel, group: GroupState) -> bool:
    return group.partial or (not group.broken and len(group.counted) >= channel.need(group))


def _stale(channel: Channel, now: float, limit: int | None = None) -> f.Fact | None:
    limit = channel.config.max_staleness if limit is None else limit
    if limit is None or channel.version <= limit:
        return None
    groups = channel.stale_before(channel.version - limit)
    return f.Dropped(channel.name, now, tuple(group.seq for group in groups), "stale") if groups else None


stale = _stale


def _overflow(channel: Channel, now: float) -> f.Fact | None:
    """Groups that are not leased make room, see `eviction`; with all the room leased, the newcomers go."""
    if channel.config.overflow != "drop_oldest":
        return None  # what is there stays: newcomers are held back until there is room
    excess = len(channel.groups) - channel.config.max_queue_size
    if excess <= 0:
        return None
    found = tuple(channel.pick_evicted(excess))
    return f.Dropped(channel.name, now, found, "capacity") if found else None
