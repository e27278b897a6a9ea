"""Groups in line, by environment and size, each lane in order of age.

A group's place is given when it enters the line and stays its own: one that was handed out and comes back stands where
it stood. Every count is kept as groups come and go; nothing here walks the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from typing import TypeAlias

import msgspec
from sortedcontainers import SortedList

#: An environment's id; None for groups that come from no environment we know.
Env: TypeAlias = int | None


class QueuedGroup(msgspec.Struct, frozen=True, order=True, gc=False):
    """One scored group in line, without its bytes; ordered by its place."""

    place: int
    number: int
    env: Env
    size: int  # sequences
    claim: Env = None  # whose it says it is, while that environment is not here yet


Lane: TypeAlias = "SortedList[QueuedGroup]"


class GroupQueue:
    """`lanes`: by environment, then by size; a lane that runs dry is gone. `sequences`: by environment. `sizes`: how
    many groups there are of each size."""

    def __init__(self) -> None:
        self.lanes: dict[Env, dict[int, Lane]] = {}
        self.sequences: dict[Env, int] = {}
        self.sizes: dict[int, int] = {}
        self._groups = 0

    def __len__(self) -> int:
        return self._groups

    def __iter__(self) -> Iterator[QueuedGroup]:
        """Every group, lane by lane: for a snapshot, never for a batch."""
        for lanes in self.lanes.values():
            for lane in lanes.values():
                yield from lane

    def __contains__(self, group: QueuedGroup) -> bool:
        return group in self.lanes.get(group.env, {}).get(group.size, ())

    @property
    def largest(self) -> int:
        """The largest group's size, 1 where there is none."""
        return max(self.sizes, default=1)

    def oldest(self, limit: int) -> QueuedGroup | None:
        """The oldest group of at most `limit` sequences."""
        heads = (lane[0] for lanes in self.lanes.values() for size, lane in lanes.items() if size <= limit)
        return min(heads, default=None)

    def by_age(self) -> Iterator[QueuedGroup]:
        """Every group from the oldest on; work in the number of lanes, and of groups that are looked at."""
        return merge(*(iter(lane) for lanes in self.lanes.values() for lane in lanes.values()))

    def add(self, group: QueuedGroup) -> None:
        lanes = self.lanes.setdefault(group.env, {})
        if group.size not in lanes:
            lanes[group.size] = SortedList()
        lanes[group.size].add(group)
        self._count(group, 1)

    def remove(self, group: QueuedGroup) -> None:
        lanes = self.lanes[group.env]
        lanes[group.size].remove(group)
        if not lanes[group.size]:
            del lanes[group.size]
        if not lanes:
            del self.lanes[group.env]
        self._count(group, -1)

    def _count(self, group: QueuedGroup, change: int) -> None:
        self._groups += change
        self.sizes[group.size] = self.sizes.get(group.size, 0) + change
        self.sequences[group.env] = self.sequences.get(group.env, 0) + change * group.size
        if not self.sizes[group.size]:
            del self.sizes[group.size]
        if not self.sequences[group.env]:
            del self.sequences[group.env]
