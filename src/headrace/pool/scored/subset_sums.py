"""Subset sums of group sizes, as bits of an integer: bit t says that t sequences can be put together.

A size's many groups are counted in powers of two, so that all sums up to a target take as many shifts as there are
sizes, times the logarithm of their counts: the work grows with the target and the sizes, not with the groups in line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

#: How many groups of each size.
Counts = Mapping[int, int]
#: The largest target for which the sums of endless groups are worked out: that takes a bit for each number up to it,
#: and a trainer may say any batch size. A thousand times the sequences of a large batch.
MAX_ENDLESS_SUMS = 1 << 20


def sums(counts: Counts, target: int) -> int:
    """Every sum up to `target` of so many groups."""
    return _extended(1, counts, 0, target)


def endless_sums(sizes: Iterable[int], target: int) -> int:
    """Every sum up to `target` of groups of these sizes, however many it takes. Where the target is larger than
    `MAX_ENDLESS_SUMS`, -1: every sum is taken to be one."""
    if target > MAX_ENDLESS_SUMS:
        return -1
    return sums({size: target // size for size in sizes}, target)


def meetable(target: int, needs: Sequence[int], supplies: Sequence[Counts]) -> list[int] | None:
    """The needs (sequences, one for each supply) that a full batch of `target` can meet: the first as far as any batch
    can, then the second as far as that leaves possible, and so on; None where nothing makes up a full batch."""
    rests = [1 << target]  # sums from which the supplies after the k-th can reach the target, from the last back
    for counts in reversed(supplies):
        rest = rests[-1]
        for portion, _, _ in _portions(counts, target):
            rest |= rest >> portion
        rests.append(rest)
    if not rests.pop() & 1:
        return None
    met, before = [], 1
    for need, counts, rest in zip(needs, supplies, reversed(rests), strict=True):
        possible, too_much = 0, need + 1
        probe = need
        while possible < probe:
            if _extended(before, counts, probe, target) & rest:
                possible = probe
            else:
                too_much = probe
            probe = (possible + too_much) // 2
        met.append(possible)
        before = _extended(before, counts, possible, target)
    return met


def plan(target: int, needs: Sequence[int], supplies: Sequence[Counts]) -> list[dict[int, int]] | None:
    """How many groups of each size to take from each supply: `target` sequences in all, from each supply at least its
    need; None where no choice does that."""
    reached = [1]
    for need, counts in zip(needs, supplies, strict=True):
        reached.append(_extended(reached[-1], counts, need, target))
    if not _has(reached.pop(), target):
        return None
    taken = []
    for need, counts, before in zip(reversed(needs), reversed(supplies), reversed(reached), strict=True):
        taken.append(_parts(before, counts, need, target))
        target -= sum(size * times for size, times in taken[-1].items())
    return taken[::-1]


def _extended(before: int, counts: Counts, need: int, target: int) -> int:
    """The sums `before`, each with every sum of so many groups that comes to the need added."""
    within = (1 << (target + 1)) - 1
    if need > 0 and len(counts) > 1:
        return _each_with_each(before, sums(counts, target) >> need << need) & within
    forced, counts = _forced(counts, need)
    for size, times in forced.items():
        before = before << size * times & within
    if need > 0 and not forced:
        return 0
    for portion, _, _ in _portions(counts, target):
        before |= before << portion & within
    return before


def _parts(before: int, counts: Counts, need: int, target: int) -> dict[int, int]:
    """How many groups of each size lead from one of the sums `before` to the target, which they can."""
    if need > 0 and len(counts) > 1:
        enough = sums(counts, target) >> need << need
        total = next(total for total in _totals(enough) if _has(before, target - total))
        return _parts(1, counts, 0, total)
    parts, counts = _forced(counts, need)
    target -= sum(size * times for size, times in parts.items())
    steps = []
    for portion, size, times in _portions(counts, target):
        steps.append((portion, size, times, before))
        before |= before << portion
    for portion, size, times, reached in reversed(steps):
        if not _has(reached, target):
            parts[size] = parts.get(size, 0) + times
            target -= portion
    return parts


def _forced(counts: Counts, need: int) -> tuple[dict[int, int], Counts]:
    """The groups of the one size there is that a need calls for, none where they are too few; and the others."""
    if need <= 0:
        return {}, counts
    for size, count in counts.items():
        times = -(-need // size)
        if times <= count:
            return {size: times}, {size: count - times}
    return {}, {}


def _each_with_each(left: int, right: int) -> int:
    if left.bit_count() < right.bit_count():
        left, right = right, left
    reached = 0
    for total in _totals(right):
        reached |= left << total
    return reached


def _totals(reached: int) -> Iterator[int]:
    """The sums in a set, rising."""
    while reached:
        lowest = reached & -reached
        yield lowest.bit_length() - 1
        reached ^= lowest


def _portions(counts: Counts, target: int) -> Iterator[tuple[int, int, int]]:
    """(sequences, size, groups) of portions of which every number of groups, as many as fit, can be put together."""
    for size, count in counts.items():
        left, times = min(count, target // size), 1
        while left > 0:
            times = min(times, left)
            yield times * size, size, times
            left -= times
            times *= 2


def _has(reached: int, total: int) -> bool:
    return total >= 0 and reached >> total & 1 == 1
