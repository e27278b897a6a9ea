"""In which parts attention over a tree of segments is computed: a pure function of the tree.

A token attends to what precedes it in its own segment, and to the first tokens of each segment on its path. The former
is one causal call for all segments, or, on a CPU, one for those of similar length; the latter is one call for each
place at which segments continue another. On a CPU a tree of many small segments costs least as one call under a mask;
on a GPU many small calls are gathered into one, and large ones go through a kernel of their own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from headrace.trainer import stacking
from headrace.trainer.prefix_tree import Indices, PrefixTree

#: What one token costs that is computed in one part more, in units of attending one token to one token, on a CPU.
MERGED_TOKEN_PAIRS = 60
#: A call under a mask, or to what is shared, computes all pairs, of which a causal one computes half.
ALL_PAIRS = 2
#: Queries times keys from which a call of its own fills a GPU: smaller ones are gathered into one.
OWN_CALL_PAIRS = 1 << 22
#: A large call on a GPU goes through cuDNN's kernel, which is nearly twice as fast as the variable-length one and takes
#: a tenth of a second for each shape that is new to it. So its sides, of at least so many tokens, have one of few
#: lengths, a 32nd apart, or so many tokens: queries are padded to the next one; keys are rounded down to one, and those
#: that are left are a call of their own.
DENSE_SIDE, DENSE_PARTS, DENSE_STEP = 1024, 32, 128
#: Tokens of a segment from which they are attended to among each other in such a call.
DENSE_SEGMENT = 2 * DENSE_SIDE - DENSE_STEP
#: Most keys for each query that are copied to gather calls into one: so copies are never many times the row.
COPIED_KEYS_PER_QUERY = 4


@dataclass(frozen=True, slots=True)
class PrefixRead:
    """Tokens of the row (begin and end) all of which attend to all of the first tokens of one segment."""

    segment: int
    queries: tuple[int, int]
    keys: tuple[int, int]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]


def prefix_reads(tree: PrefixTree) -> list[PrefixRead]:
    """Every place at which segments continue another: together they are all that tokens attend to outside of their own
    segments."""
    ends, cuts, found = tree.ends(), tree.cuts, []
    begins = [at for at, parent in enumerate(tree.parents) if parent >= 0]
    # Behind a segment stands first all that continues its first tokens, directly or not: sorted by parent, what belongs
    # together is together.
    begins.sort(key=lambda at: (tree.parents[at], at))
    for (parent, shared), members in groupby(begins, key=lambda at: (tree.parents[at], tree.shared[at])):
        group = list(members)
        queries = (cuts[group[0]], cuts[ends[group[-1]]])
        found.append(PrefixRead(parent, queries, (cuts[parent], cuts[parent] + shared)))
    return found


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Tokens of the row that attend among each other: a segment, or one with all that continues it under a mask."""

    begin: int
    end: int
    mask: Any = None  # bool[tokens, tokens], numpy's; None: causal


def plan_blocks(tree: PrefixTree) -> tuple[list[AttentionBlock], list[PrefixRead]]:
    """A tree's cheapest parts on a CPU: blocks, and what is read besides. Every token is in one block."""
    ends, cuts = tree.ends(), tree.cuts
    reads = prefix_reads(tree)
    parts = [float((cuts[at + 1] - cuts[at]) ** 2) for at in range(len(ends))]
    for read in reads:
        queries, keys = read.lengths
        parts[read.segment] += stacking.CALL_COST + queries * (ALL_PAIRS * keys + MERGED_TOKEN_PAIRS)
    whole = [
        stacking.CALL_COST + float(ALL_PAIRS * (cuts[end] - cuts[at]) ** 2) if end > at + 1 else np.inf
        for at, end in enumerate(ends)
    ]
    least = list(parts)
    for at in reversed(range(len(ends))):
        least[at] = min(parts[at], whole[at])
        if tree.parents[at] >= 0:
            parts[tree.parents[at]] += least[at]
    blocks, at, split = [], 0, set()
    while at < len(ends):
        if whole[at] < parts[at]:
            blocks.append(AttentionBlock(cuts[at], cuts[ends[at]], _mask(tree, at, ends[at])))
            at = ends[at]
        else:
            blocks.append(AttentionBlock(cuts[at], cuts[at + 1]))
            split.add(at)
            at += 1
    return blocks, [read for read in reads if read.segment in split]


def _mask(tree: PrefixTree, first: int, end: int) -> Any:
    """Which tokens of some segments each of them attends to, the first one's ancestors left out."""
    cuts, origin = tree.cuts, tree.cuts[first]
    sees = np.zeros((cuts[end] - origin,) * 2, np.bool_)
    for at in range(first, end):
        rows = slice(cuts[at] - origin, cuts[at + 1] - origin)
        if at > first:
            sees[rows] = sees[cuts[tree.parents[at]] - origin + tree.shared[at] - 1]
        sees[rows, rows] = np.tri(rows.stop - rows.start, dtype=np.bool_)
    return sees


def plan_calls(tree: PrefixTree) -> list[list[PrefixRead]]:
    """What is read in each call of a variable-length kernel. No two reads of a call have a query or a key in common."""
    levels = [0] * len(tree.parents)
    for at, parent in enumerate(tree.parents):
        levels[at] = 0 if parent < 0 else levels[parent] + 1
    alone: list[list[PrefixRead]] = []
    gathered: dict[tuple[int, int], list[PrefixRead]] = defaultdict(list)
    for _, reads in groupby(prefix_reads(tree), key=lambda read: read.segment):
        for number, read in enumerate(reads):
            queries, keys = read.lengths
            if queries * keys >= OWN_CALL_PAIRS or keys > COPIED_KEYS_PER_QUERY * queries:
                alone.append([read])
            else:
                gathered[levels[read.segment], number].append(read)
    return alone + [gathered[key] for key in sorted(gathered)]


def dense_length(tokens: int) -> int:
    """The most of so many tokens that a dense call takes; 0 where they are too few for one."""
    return tokens // _dense_step(tokens) * _dense_step(tokens) if tokens >= DENSE_SIDE else 0


def padded_length(tokens: int) -> int:
    """The least of a dense call's lengths that has room for so many tokens."""
    return -(-tokens // _dense_step(tokens)) * _dense_step(tokens)


def _dense_step(tokens: int) -> int:
    return max((1 << tokens.bit_length() - 1) // DENSE_PARTS, DENSE_STEP)


def dense_part(read: PrefixRead) -> tuple[PrefixRead | None, PrefixRead | None]:
    """The part of a read that a dense call takes, and what is left of it: together every pair of a query and a key
    once. None stands for nothing."""
    queries, keys = read.lengths
    dense_keys = dense_length(keys)
    if queries < DENSE_SIDE or not dense_keys:
        return None, read
    split = read.keys[0] + dense_keys
    dense = PrefixRead(read.segment, read.queries, (read.keys[0], split))
    return dense, PrefixRead(read.segment, read.queries, (split, read.keys[1])) if dense_keys < keys else None


def dense_segments(tree: PrefixTree) -> list[int]:
    """Segments that are long enough for a dense call."""
    return [at for at, length in enumerate(np.diff(tree.cuts)) if length >= DENSE_SEGMENT]


@dataclass(frozen=True, slots=True, eq=False)
class TreePaths:
    """A tree with nothing shared: each segment with all that precedes it as a sequence of its own.

    tokens  the row's token at each place of that longer row
    cuts    where its sequences begin and end
    own     the place of each token of the row: that in its own segment's sequence
    """

    tokens: Indices
    cuts: tuple[int, ...]
    own: Indices


def plan_paths(tree: PrefixTree) -> TreePaths:
    """The paths of all segments."""
    paths: list[Indices] = []
    before: list[int] = []
    for at, (parent, shared) in enumerate(zip(tree.parents, tree.shared, strict=True)):
        before.append(0 if parent < 0 else before[parent] + shared)
        prefix = paths[parent][: before[at]] if parent >= 0 else np.empty(0, np.int64)
        paths.append(np.concatenate([prefix, np.arange(tree.cuts[at], tree.cuts[at + 1])]))
    cuts = np.cumsum([0, *map(len, paths)])
    own = [np.arange(cuts[at] + before[at], cuts[at + 1]) for at in range(len(paths))]
    return TreePaths(np.concatenate(paths), tuple(cuts.tolist()), np.concatenate(own))
