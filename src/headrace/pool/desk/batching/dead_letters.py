"""Groups that can never be served: larger than the batch, or of a size that no full batch can hold.

What may still come is judged by what is there: the sizes in line, those that are out and may come back, and the group
sizes of connected environments. Sizes are condemned only once a batch's worth is in line, so that the first
environment's groups outlast the second's late start; those that wait in a buffer, once it holds `PATIENCE` times the
group size. A size that was condemned before gets no such time again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from headrace.pool.desk.batching.queue import Group, Queue
from headrace.pool.desk.batching.subset import endless_sums

#: Group sizes' worth of odd groups that an environment's buffer keeps in the hope of a match.
PATIENCE = 64


class DeadLetter(msgspec.Struct, frozen=True):
    """Why a group can never be served: the kind, to count by, and in words."""

    kind: Literal["too_large", "unmatched"]
    reason: str


def unservable(
    queue: Queue, coming: Iterable[int], batch_size: int, condemned: Collection[int] = ()
) -> Iterator[tuple[Group, DeadLetter]]:
    """The queued groups that no batch of this size can hold, with those of the sizes that may come; each with why.
    `condemned`: the sizes that were found so before."""
    return _unservable(queue, coming, batch_size, "batch_size", patience=1, condemned=condemned)


def fits(size: int, coming: Iterable[int], batch_size: int) -> bool:
    """Whether groups of this size and of those that may come make up a batch that holds one of this size."""
    fitting = {one for one in (size, *coming) if one <= batch_size}
    return size <= batch_size and endless_sums(fitting, batch_size) >> (batch_size - size) & 1 == 1


def unmatched(buffer: Queue, group_size: int) -> Iterator[tuple[Group, DeadLetter]]:
    """The buffered groups that nothing in the buffer, however much came of it, makes up to the group size."""
    return _unservable(buffer, (), group_size, "group_size", patience=PATIENCE)


def _unservable(
    queue: Queue, coming: Iterable[int], target: int, name: str, *, patience: int, condemned: Collection[int] = ()
) -> Iterator[tuple[Group, DeadLetter]]:
    fitting = {size for size in (*queue.sizes, *coming) if size <= target}
    waiting = sum(size * count for size, count in queue.sizes.items() if size <= target)
    judged = queue.sizes.keys() if waiting >= patience * target else queue.sizes.keys() & condemned
    reached = endless_sums(fitting, target) if judged else -1  # -1: every sum
    dead: dict[int, DeadLetter] = {}
    for size in queue.sizes:
        if size > target:
            dead[size] = DeadLetter("too_large", f"its {size} sequences exceed {name} {target}")
        elif size in judged and not reached >> (target - size) & 1:
            dead[size] = DeadLetter("unmatched", f"no groups make up its {size} sequences to {name} {target}")
    if dead:  # nearly never: looking costs the sizes there are, not the environments
        for lanes in queue.lanes.values():
            for size in dead.keys() & lanes.keys():
                yield from ((group, dead[size]) for group in lanes[size])
