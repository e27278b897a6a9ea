"""Which groups the next batch takes.

`fifo` takes the oldest that are ready, `latest` the newest, `mixed` the oldest and, for a share of the batch, groups
from history, those replayed least first. A group's place is its age, whatever happened to it since: one that comes back
from a lost lease stands where it stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice

from headrace.pool.channel import Channel
from headrace.pool.groups import FULL, GroupState


def ready_groups(channel: Channel, n_rollouts: int | None, *, newest_first: bool = False) -> Iterator[int]:
    """Seqs of the groups that a fetch may take, by age. `n_rollouts` only lowers what a group needs."""
    buckets = [channel.ready[FULL]]
    if n_rollouts is not None:
        buckets += [channel.ready[k] for k in channel.ready if k != FULL and k >= n_rollouts]
    if newest_first:
        return merge(*map(reversed, buckets), reverse=True)
    return iter(buckets[0]) if len(buckets) == 1 else merge(*buckets)


def ready_count(channel: Channel, n_rollouts: int | None) -> int:
    """How many groups a fetch could take."""
    return sum(len(b) for k, b in channel.ready.items() if k == FULL or (n_rollouts is not None and k >= n_rollouts))


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
