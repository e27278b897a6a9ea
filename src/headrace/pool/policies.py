"""Choices over what the pool holds, pure: which groups the next batch takes, and which facts are due.

Order: `fifo` takes the oldest groups that are ready, `latest` the newest, `mixed` the oldest and, for a share of the
batch, groups from history, those replayed least first. A group's place is its age, whatever happened to it since: one
that comes back from a lost lease stands where it stood.

Due is what the clock, a new version, a full queue or a batch size that nothing can fill call for. It is asked for
before and after every call, so nothing waits for a timer; a caller that blocks wakes for `Channel.deadline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, merge
from itertools import islice

from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.groups import FULL, GroupState
from headrace.pool.scored import facts as scored_facts
from headrace.pool.scored.groups import ScoredGroups

# -- the next batch ----------------------------------------------------------------------------------------------------


def ready_groups(channel: Channel, n_rollouts: int | None, *, newest_first: bool = False) -> Iterator[int]:
    """Seqs of the groups that a fetch may take, by age. `n_rollouts` only lowers what a group needs."""
    buckets = [channel.ready[FULL]]
    if n_rollouts is not None:
        buckets += [channel.ready[k] for k in channel.ready if k != FULL and k >= n_rollouts]
    if newest_first:
        return merge(*map(reversed, buckets), reverse=True)
    return iter(buckets[0]) if len(buckets) == 1 else merge(*buckets)


def pick(
    channel: Channel, size: int, n_rollouts: int | None, order: str, max_staleness: int | None = None
) -> tuple[list[int], list[int]]:
    """(fresh, replayed) seqs that make up a batch of `size` groups; fewer where fewer are there."""
    replayed: list[int] = []
    if order == "mixed" and channel.history:
        share = int(size * channel.config.replay_share)
        by_use = sorted(_replayable(channel, max_staleness), key=lambda group: (group.deliveries, -group.seq))
        replayed = [group.seq for group in by_use[:share]]
    fresh = islice(ready_groups(channel, n_rollouts, newest_first=order == "latest"), size - len(replayed))
    return list(fresh), replayed


def _replayable(channel: Channel, max_staleness: int | None) -> Iterator[GroupState]:
    """The history, less what the channel or the fetch calls stale: fresh groups of that age would not be served."""
    limits = [limit for limit in (channel.config.max_staleness, max_staleness) if limit is not None]
    oldest = channel.version - min(limits) if limits else 0
    return (group for group in channel.history.values() if group.oldest is None or group.oldest >= oldest)


def surplus(channel: Channel, group: GroupState) -> list[str]:
    """Trajectories that a hand-out of the group leaves behind: those that do not count, and those beyond its need."""
    counted = set(group.counted[: channel.need(group)])
    return [uid for uid in group.trajectories if uid not in counted]


# -- what is due -------------------------------------------------------------------------------------------------------


def due(channel: Channel, now: float) -> Iterator[f.Fact]:
    """Facts that are due in a channel; each is applied before the next is asked for."""
    if channel.grace_deadlines:
        channel.end_graces(now)
    if channel.replies:
        channel.forget_replies(now)
    while fact := next_due(channel, now):
        yield fact


def next_due(channel: Channel, now: float) -> f.Fact | None:
    """The first fact that is due: a lease that ran out, a timeout, stale groups, too many groups."""
    return _expired_lease(channel, now) or _timed_out(channel, now) or stale(channel, now) or _overflow(channel, now)


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


def stale(channel: Channel, now: float, limit: int | None = None) -> f.Fact | None:
    """Drops the groups that are more versions behind than `limit`, or than the channel allows."""
    limit = channel.config.max_staleness if limit is None else limit
    if limit is None or channel.version <= limit:
        return None
    groups = channel.stale_before(channel.version - limit)
    return f.Dropped(channel.name, now, tuple(group.seq for group in groups), "stale") if groups else None


def _overflow(channel: Channel, now: float) -> f.Fact | None:
    """Groups that are not leased make room (`EvictionQueue`); with all the room leased, the newcomers go."""
    if channel.config.overflow != "drop_oldest":
        return None  # what is there stays: newcomers are held back until there is room
    excess = len(channel.groups) - channel.config.max_queue_size
    if excess <= 0:
        return None
    found = tuple(channel.pick_evicted(excess))
    return f.Dropped(channel.name, now, found, "capacity") if found else None


def due_of_scored(scored: ScoredGroups, now: float) -> Iterator[scored_facts.ScoredFact]:
    """Facts that are due of scored groups, leases that ran out and dead letters; each is applied before the next."""
    while scored.deadlines and scored.deadlines[0][0] <= now:
        lease = scored.leases.get(scored.deadlines[0][1])
        if lease is None:
            heappop(scored.deadlines)
        else:
            yield scored_facts.BatchReturned("", now, lease.id, "expired")
    while unservable := scored.unservable():
        why = next(iter(unservable.values()))
        numbers = tuple(number for number, found in unservable.items() if found == why)
        yield scored_facts.GroupsDropped("", now, numbers, why.kind, why.reason)
