"""Who makes room in a full channel: of the owner with the most groups, the oldest that is empty, else the oldest.

An owner is what stands before the first slash of a group's prompt uid (a gateway's tenant), in a channel that is shared
`by_owner`; in any other, all groups have one. So nobody loses groups to somebody who has more, and an announcement
without a step never displaces what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.pool.ages import ByAge
from headrace.pool.entities import GroupState


class Crowd:
    """The groups of a channel that may be dropped."""

    def __init__(self, groups: Iterable[GroupState], *, by_owner: bool) -> None:
        self._by_owner = by_owner
        self._all: dict[str, ByAge] = {}  # an owner without groups is gone
        self._empty: dict[str, ByAge] = {}
        for group in groups:
            self.add(group)

    def add(self, group: GroupState) -> None:
        owner = self._owner(group)
        self._all.setdefault(owner, ByAge()).add(group.seq)
        if not group.queued:
            self._empty.setdefault(owner, ByAge()).add(group.seq)

    def discard(self, group: GroupState) -> None:
        owner = self._owner(group)
        for sets in (self._all, self._empty):
            if owner in sets:
                sets[owner].discard(group.seq)
                if not sets[owner]:
                    del sets[owner]

    def filled(self, group: GroupState) -> None:
        """A group has a step now."""
        owner = self._owner(group)
        if owner in self._empty:
            self._empty[owner].discard(group.seq)
            if not self._empty[owner]:
                del self._empty[owner]

    def least(self, count: int) -> list[int]:
        """The groups that make room, so many or as many as there are. Changes nothing."""
        left = {owner: len(groups) for owner, groups in self._all.items()}
        wanted: dict[str, int] = {}
        for _ in range(min(count, sum(left.values()))):
            largest = max(left, key=left.__getitem__)
            left[largest] -= 1
            wanted[largest] = wanted.get(largest, 0) + 1
        return [seq for owner, number in wanted.items() for seq in self._of(owner, number)]

    def _of(self, owner: str, count: int) -> list[int]:
        found: dict[int, None] = {}
        for groups in (self._empty.get(owner, ()), self._all[owner]):
            for seq in groups:
                if len(found) == count:
                    return list(found)
                found[seq] = None
        return list(found)

    def _owner(self, group: GroupState) -> str:
        owner, slash, _ = group.uid.partition("/")
        return owner if self._by_owner and slash else ""
