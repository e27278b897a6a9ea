"""Batching written from the contract's words, with lists and no thought for speed, to hold the real one to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil

from hypothesis import strategies as st

from headrace.pool.scored.batching import Batching

#: (environment, sequences) of groups, oldest first.
Line = list[tuple[int, int]]


@dataclass(frozen=True)
class Posted:
    number: int
    env: int | None
    size: int


def posted(line: Line) -> list[Posted]:
    return [Posted(number, env, size) for number, (env, size) in enumerate(line)]


def queued(line: Line, shares: dict[int, float] | None = None) -> Batching:
    """A batching with these groups in the queue, numbered from 0, whatever their environments' group sizes."""
    batching, shares = Batching(), shares or {}
    for number, (env, size) in enumerate(line):
        batching.connect(env, group_size=size, max_token_length=1, min_allocation=shares.get(env))
        batching.add(number, env, size)
    for env, share in shares.items():
        batching.connect(env, group_size=1, max_token_length=1, min_allocation=share)
    return batching


def packs(groups: list[Posted], batch_size: int) -> list[int] | None:
    """Equal-sized groups pack, oldest first, into packs of the largest size; packs are taken as they became full."""
    largest = max((group.size for group in groups), default=1)
    open_packs: dict[int, list[Posted]] = {}
    batch: list[Posted] = []
    for group in groups:
        pack = open_packs.setdefault(group.size, [])
        pack.append(group)
        if len(pack) * group.size == largest:
            batch += open_packs.pop(group.size)
            if sum(each.size for each in batch) == batch_size:
                return [each.number for each in batch]
    return None


def oldest_fill(groups: list[Posted], batch_size: int, minimums: dict[int, int] | None = None) -> list[int] | None:
    """Of all choices that fill the batch: those that honour the minimums best, in order; of these the oldest."""
    best: tuple[list[int], tuple[bool, ...]] | None = None
    for taken in product((True, False), repeat=len(groups)):
        chosen = [group for group, this in zip(groups, taken, strict=True) if this]
        if sum(group.size for group in chosen) != batch_size:
            continue
        honoured = [
            min(minimum, sum(group.size for group in chosen if group.env == env))
            for env, minimum in sorted((minimums or {}).items())
        ]
        if best is None or (honoured, taken) > best:
            best = (honoured, taken)
    return None if best is None else [g.number for g, this in zip(groups, best[1], strict=True) if this]


def env_queue_size(groups: list[Posted], env: int, group_size: int, minimums: dict[int, int]) -> int:
    """`/status-env`'s `queue_size`, group by group."""
    largest = max((group.size for group in groups), default=1)
    own = sum(group.size for group in groups if group.env == env)
    others = 0
    for other in {group.env for group in groups} - {env}:
        sequences = sum(group.size for group in groups if group.env == other)
        minimum = minimums.get(other, 0) if other is not None else 0
        others += max(0, ceil(sequences / largest) * largest - minimum)
    return (own + others) // group_size


def lines(sizes: list[int], *, longest: int, envs: int = 3) -> st.SearchStrategy[Line]:
    return st.lists(st.tuples(st.integers(0, envs - 1), st.sampled_from(sizes)), max_size=longest)
