"""An exact fill by age: the oldest group that some full batch can hold, then the next oldest, and so on.

Groups come in supplies, one for each environment with a minimum and one for everybody else; of each supply at least its
need is taken, or, where no full batch allows that, as much of the need as the earlier supplies leave possible. If any
choice of groups fills the batch, one is found, and the oldest group that is part of any such choice is in it.

First fit does it nearly always, and where it ends full it is this very choice: what it took, the batch itself shows to
be possible, and what it passed over would have left too little room for what is owed. Otherwise sums of sizes decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from headrace.pool.desk.batching.queue import Group, Lane
from headrace.pool.desk.batching.subset import meetable, plan

#: Supplies to look at, in new plans for the sake of age, that one batch is worth (and some plans however many supplies
#: there are); after these it follows the plan that it has.
WORTH = 64
SOME = 4


@dataclass
class Supply:
    """Lanes to take from, and how many sequences of the batch are theirs before anyone else's."""

    lanes: list[tuple[int, Lane]]  # (size, groups by age)
    need: int = 0

    def counts(self) -> dict[int, int]:
        counts = dict.fromkeys(sorted(size for size, _ in self.lanes), 0)  # sorted: a restored state plans the same
        for size, lane in self.lanes:
            counts[size] += len(lane)
        return counts

    def owed(self, need: int) -> int:
        """The fewest sequences that meet a need: whole groups, where all are of one size."""
        if need <= 0:
            return 0
        size = self.lanes[0][0]
        return -(-need // size) * size if len(self.lanes) == 1 else need

    def at_most(self, room: int) -> int:
        """The most sequences that room can hold: whole groups, where all are of one size."""
        return room // self.lanes[0][0] * self.lanes[0][0] if len(self.lanes) == 1 else room


class Walk:
    """The groups of all supplies from the oldest on; lanes that are of no more use are left out."""

    def __init__(self, supplies: Sequence[Supply]) -> None:
        self._heap: list[tuple[Group, int, Iterator[Group]]] = []
        for index, supply in enumerate(supplies):
            for _, lane in supply.lanes:
                groups = iter(lane)
                self._heap.append((next(groups), index, groups))
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> tuple[Group, int]:
        """The oldest group, and whose supply it is of."""
        return self._heap[0][:2]

    def advance(self) -> None:
        _, index, groups = self._heap[0]
        following = next(groups, None)
        if following is None:
            heappop(self._heap)
        else:
            heapreplace(self._heap, (following, index, groups))

    def drop(self) -> None:
        """Leaves the oldest group's lane out."""
        heappop(self._heap)


def fill(target: int, supplies: Sequence[Supply]) -> list[Group] | None:
    """Groups of exactly `target` sequences, by age; None where none make it up. Every lane holds a group that fits."""
    return _first_fit(target, supplies) or _planned(target, supplies)


def _first_fit(target: int, supplies: Sequence[Supply]) -> list[Group] | None:
    needs, owed = [], 0
    for supply in supplies:
        needs.append(min(supply.need, supply.at_most(target - owed)))
        owed += supply.owed(needs[-1])
    walk, chosen = Walk(supplies), []
    while target and walk:
        group, index = walk.head
        need = needs[index] - group.size
        then_owed = owed - supplies[index].owed(needs[index]) + supplies[index].owed(need)
        if target - group.size < then_owed:
            walk.drop()  # and so it stays: room that is not owed only shrinks
            continue
        chosen.append(group)
        target, needs[index], owed = target - group.size, need, then_owed
        walk.advance()
    return chosen if not target else None


def _planned(target: int, supplies: Sequence[Supply]) -> list[Group] | None:
    counts = [supply.counts() for supply in supplies]
    needs = meetable(target, [supply.need for supply in supplies], counts)
    if needs is None:
        return None
    current = plan(target, needs, counts)
    assert current is not None, "the needs were made such that a plan exists"
    walk, chosen, plans = Walk(supplies), [], max(SOME, WORTH // len(supplies))
    while target:
        group, index = walk.head
        size = group.size
        if not current[index].get(size):
            other = None
            if plans and counts[index][size]:
                plans -= 1
                other = _plan_with(group, index, target, needs, counts)
                if other is None:
                    counts[index][size] = 0  # part of no full batch from here on
            if other is None:
                walk.drop()
                continue
            current = other
        chosen.append(group)
        current[index][size] -= 1
        counts[index][size] -= 1
        needs[index] -= size
        target -= size
        walk.advance()
    return chosen


def _plan_with(
    group: Group, index: int, target: int, needs: Sequence[int], counts: Sequence[dict[int, int]]
) -> list[dict[int, int]] | None:
    """A plan for what is left of the batch that takes this group."""
    if group.size > target:
        return None
    less = [dict(each) for each in counts]
    less[index][group.size] -= 1
    owed = [need - group.size if at == index else need for at, need in enumerate(needs)]
    found = plan(target - group.size, owed, less)
    if found is not None:
        found[index][group.size] = found[index].get(group.size, 0) + 1
    return found
