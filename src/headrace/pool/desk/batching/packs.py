"""Packs: equal-sized groups, oldest first, as many as make up the largest size M in the line.

Packs leave in the order in which they became full. Where every size divides M and M divides the batch, packs fill any
batch exactly; elsewhere they cannot be counted on (`regular`), and `exact` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import cast

from headrace.pool.desk.batching.queue import Group, Queue


def regular(sizes: Iterable[int], batch_size: int) -> bool:
    """Whether packs of the largest of these sizes can take in every group and fill a batch."""
    present = list(sizes)
    largest = max(present, default=1)
    return batch_size % largest == 0 and all(largest % size == 0 for size in present)


def fill(queue: Queue, batch_size: int) -> list[Group] | None:
    """The packs of the next batch of a regular queue, or None where too few are full."""
    sizes = [size for size in queue.sizes if size <= batch_size]
    largest = max(sizes, default=1)
    streams = [_packs(_by_age(queue, size), largest // size) for size in sizes]
    chosen = list(islice(merge(*streams, key=lambda pack: pack[-1]), batch_size // largest))
    return [group for pack in chosen for group in pack] if len(chosen) * largest == batch_size else None


def _packs(groups: Iterator[Group], length: int) -> Iterator[list[Group]]:
    while len(pack := list(islice(groups, length))) == length:
        yield pack


def _by_age(queue: Queue, size: int) -> Iterator[Group]:
    return merge(*(cast("Iterable[Group]", lanes[size]) for lanes in queue.lanes.values() if size in lanes))
