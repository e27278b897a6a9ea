"""Which groups the next batch takes: packs where the sizes allow it and no environment has a minimum, else by age.

Packs are equal-sized groups, oldest first, as many as make up the largest size M in the line; they leave in the order
in which they became full. Where every size divides M and M divides the batch, packs fill any batch exactly.

Elsewhere the batch is filled by age: the oldest group that some full batch can hold, then the next oldest, and so on.
Groups come in supplies, one for each environment with a minimum and one for all others; of each supply at least its
need is taken, or, where no full batch allows that, as much of the need as the earlier supplies leave possible. If any
choice of groups fills the batch, one is found, and the oldest group that is part of any such choice is in it.

First fit does it nearly always, and where it ends full it is this very choice: what it took, the batch itself shows to
be possible, and what it passed over would have left too little room for the needs. Otherwise sums of sizes decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace, merge
from itertools import islice
from typing import cast

from headrace.pool.scored.environments import Environments
from headrace.pool.scored.queue import GroupQueue, Lane, QueuedGroup
from headrace.pool.scored.subset_sums import meetable, plan

#: With so many batches' worth queued and too few packs full, the batch is filled by age: environments that pause at a
#: long queue would never fill the packs.
STUCK_BATCHES = 2
#: How much work one batch is worth: new plans for the sake of age look at so many supplies in all, and there may be so
#: many of them however many supplies there are. After these a batch follows the plan that it has.
SUPPLIES_PLANNED = 64
MIN_PLANS = 4


def next_batch(
    queue: GroupQueue, environments: Environments, batch_size: int, *, by_age: bool = False
) -> list[QueuedGroup] | None:
    """Groups of exactly `batch_size` sequences; None where no batch is ready. Larger groups are passed over."""
    sizes = {size: count for size, count in queue.sizes.items() if size <= batch_size}
    sequences = sum(size * count for size, count in sizes.items())
    if sequences < batch_size:
        return None
    supplies = _supplies(queue, environments.granted_minimums(batch_size), batch_size)
    if len(supplies) == 1 and not by_age and packs_fit(sizes, batch_size):
        chosen = fill_with_packs(queue, batch_size)
        if chosen is not None or sequences < STUCK_BATCHES * batch_size:
            return chosen
    return fill_by_age(batch_size, supplies)


def _supplies(queue: GroupQueue, minimums: dict[int, int], batch_size: int) -> list[GroupSupply]:
    """The groups that fit: a supply for each environment that has a minimum and groups, and one for all others."""
    with_minimum, rest = [], []
    for env, by_size in queue.lanes.items():
        lanes = [(size, lane) for size, lane in by_size.items() if size <= batch_size]
        if env is None or env not in minimums:
            rest += lanes
        elif lanes:
            available = sum(size * len(lane) for size, lane in lanes)
            with_minimum.append((env, GroupSupply(lanes, min(minimums[env], available))))
    with_minimum.sort(key=lambda pair: pair[0])
    return [supply for _, supply in with_minimum] + [GroupSupply(rest)]


# -- packs -------------------------------------------------------------------------------------------------------------


def packs_fit(sizes: Iterable[int], batch_size: int) -> bool:
    """Whether packs of the largest of these sizes can take in every group and fill a batch."""
    present = list(sizes)
    largest = max(present, default=1)
    return batch_size % largest == 0 and all(largest % size == 0 for size in present)


def fill_with_packs(queue: GroupQueue, batch_size: int) -> list[QueuedGroup] | None:
    """The packs of the next batch of a queue whose sizes pack, or None where too few are full."""
    sizes = [size for size in queue.sizes if size <= batch_size]
    largest = max(sizes, default=1)
    streams = [_packs(_by_age(queue, size), largest // size) for size in sizes]
    chosen = list(islice(merge(*streams, key=lambda pack: pack[-1]), batch_size // largest))
    return [group for pack in chosen for group in pack] if len(chosen) * largest == batch_size else None


def _packs(groups: Iterator[QueuedGroup], length: int) -> Iterator[list[QueuedGroup]]:
    while len(pack := list(islice(groups, length))) == length:
        yield pack


def _by_age(queue: GroupQueue, size: int) -> Iterator[QueuedGroup]:
    return merge(*(cast("Iterable[QueuedGroup]", lanes[size]) for lanes in queue.lanes.values() if size in lanes))


# -- by age ------------------------------------------------------------------------------------------------------------


@dataclass
class GroupSupply:
    """Lanes to take from, and how many sequences of the batch are theirs before anyone else's."""

    lanes: list[tuple[int, Lane]]  # (size, groups by age)
    need: int = 0

    def counts(self) -> dict[int, int]:
        """How many groups there are of each size."""
        counts = dict.fromkeys(sorted(size for size, _ in self.lanes), 0)  # sorted: a restored state plans the same
        for size, lane in self.lanes:
            counts[size] += len(lane)
        return counts

    def fewest(self, need: int) -> int:
        """The fewest sequences that meet a need: whole groups, where all are of one size."""
        if need <= 0:
            return 0
        size = self.lanes[0][0]
        return -(-need // size) * size if len(self.lanes) == 1 else need

    def at_most(self, room: int) -> int:
        """The most sequences that room can hold: whole groups, where all are of one size."""
        return room // self.lanes[0][0] * self.lanes[0][0] if len(self.lanes) == 1 else room


class _OldestFirst:
    """The groups of all supplies from the oldest on; lanes that are of no more use are left out."""

    def __init__(self, supplies: Sequence[GroupSupply]) -> None:
        self._heap: list[tuple[QueuedGroup, int, Iterator[QueuedGroup]]] = []
        for index, supply in enumerate(supplies):
            for _, lane in supply.lanes:
                groups = iter(lane)
                self._heap.append((next(groups), index, groups))
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def head(self) -> tuple[QueuedGroup, int]:
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


def fill_by_age(target: int, supplies: Sequence[GroupSupply]) -> list[QueuedGroup] | None:
    """Groups of exactly `target` sequences, by age; None where none make it up. Every lane holds a group that fits."""
    return _first_fit(target, supplies) or _planned(target, supplies)


def _first_fit(target: int, supplies: Sequence[GroupSupply]) -> list[QueuedGroup] | None:
    needs, reserved = [], 0  # sequences of the batch that needs which are not met yet will take
    for supply in supplies:
        needs.append(min(supply.need, supply.at_most(target - reserved)))
        reserved += supply.fewest(needs[-1])
    walk, chosen = _OldestFirst(supplies), []
    while target and walk:
        group, index = walk.head
        need = needs[index] - group.size
        then_reserved = reserved - supplies[index].fewest(needs[index]) + supplies[index].fewest(need)
        if target - group.size < then_reserved:
            walk.drop()  # and so it stays: room that is not reserved only shrinks
            continue
        chosen.append(group)
        target, needs[index], reserved = target - group.size, need, then_reserved
        walk.advance()
    return chosen if not target else None


def _planned(target: int, supplies: Sequence[GroupSupply]) -> list[QueuedGroup] | None:
    counts = [supply.counts() for supply in supplies]
    needs = meetable(target, [supply.need for supply in supplies], counts)
    if needs is None:
        return None
    current = plan(target, needs, counts)
    assert current is not None, "the needs were made such that a plan exists"
    walk, chosen, plans = _OldestFirst(supplies), [], max(MIN_PLANS, SUPPLIES_PLANNED // len(supplies))
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
    group: QueuedGroup, index: int, target: int, needs: Sequence[int], counts: Sequence[dict[int, int]]
) -> list[dict[int, int]] | None:
    """A plan for what is left of the batch that takes this group."""
    if group.size > target:
        return None
    less = [dict(each) for each in counts]
    less[index][group.size] -= 1
    needs_left = [need - group.size if at == index else need for at, need in enumerate(needs)]
    found = plan(target - group.size, needs_left, less)
    if found is not None:
        found[index][group.size] = found[index].get(group.size, 0) + 1
    return found
