"""Sequences that begin alike as one row in which each shared token stands once.

The row consists of segments. A segment continues another one, its parent, after that one's first so many tokens, or
begins a tree; its tokens are preceded, in order, by what its parent's first tokens are preceded by, by those, and by
each other. Of the branches at a fork the one with the most tokens continues its segment and the others begin their own:
so a long conversation with many short side branches is one long segment and as many short ones, each one parent deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.data.errors import InvalidInput

Ids = npt.NDArray[np.integer[Any]]
Indices = npt.NDArray[np.int64]

#: What attention to shared tokens costs by its call alone, in tokens through the model; on a CPU small calls are one.
FORK_TOKENS, FORK_TOKENS_CPU = 64, 8
#: What a token behind a fork costs more, as a share of a token through the model: its parts are merged.
MERGED_TOKEN_COST = 1 / 32


@dataclass(frozen=True, slots=True)
class SharingRule:
    """When sequences share the tokens that they begin with: where that saves more than a fork costs (`fork_tokens`, and
    `MERGED_TOKEN_COST` for each token behind it), or copies would make the row longer than `most` tokens."""

    fork_tokens: int = 0
    most: int | None = None

    @classmethod
    def on(cls, device: str, most: int | None = None) -> SharingRule:
        """The rule for a device (cpu, cuda, cuda:1, ...)."""
        return cls(FORK_TOKENS_CPU if device.startswith("cpu") else FORK_TOKENS, most)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """How the segments of a row hang together. Hashable: attention plans once for each.

    cuts      where segments begin and end: segment i is the row's tokens cuts[i] to cuts[i + 1]
    parents   the segment that each continues; -1 where it begins a tree
    shared    how many tokens of its parent each continues; 0 where it begins a tree

    A segment stands behind its parent, with everything that continues it directly behind it; segments that continue the
    same number of their parent's tokens stand together.
    """

    cuts: tuple[int, ...]
    parents: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, cuts: Sequence[int]) -> PrefixTree:
        """Segments that share nothing."""
        return cls(tuple(cuts), (-1,) * (len(cuts) - 1), (0,) * (len(cuts) - 1))

    @property
    def is_shared(self) -> bool:
        """Whether any segment continues another."""
        return any(parent >= 0 for parent in self.parents)

    def ends(self) -> list[int]:
        """For each segment the number of the first segment behind it that does not continue it, directly or not.
        Raises `InvalidInput` where the segments are in no order in which that can be told."""
        found = [0] * len(self.parents)
        path: list[int] = []
        for at, (parent, shared) in enumerate(zip(self.parents, self.shared, strict=True)):
            while path and path[-1] != parent:
                found[path.pop()] = at
            length = 0 if parent < 0 else self.cuts[parent + 1] - self.cuts[parent]
            if (parent >= 0 and not path) or not (0 < shared <= length or (parent < 0 and not shared)):
                raise InvalidInput(
                    f"segment {at} continues {shared} tokens of segment {parent}; it must stand behind its parent, "
                    f"before anything that does not continue that, and share 1 to {length} of its tokens"
                )
            path.append(at)
        for at in path:
            found[at] = len(self.parents)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Sequences as one row.

    ids, positions  int64[T]   the row's tokens, and at which place of its sequences each stands
    tree            its segments
    places          for each sequence int64: where in the row its tokens stand, as many of them as are needed
    """

    ids: Indices
    positions: Indices
    tree: PrefixTree
    places: list[Indices]


def shared_row(sequences: Sequence[Ids], rule: SharingRule) -> TokenRow:
    """The row of these sequences' tokens, each of which has at least one.

    Where a fork does not pay by the rule, each of its branches gets a copy of what they share. Of sequences of which
    one begins with the other, and of equal ones, each token always stands once.
    """
    if not all(map(len, sequences)):
        raise InvalidInput(f"sequence {list(map(len, sequences)).index(0)} has no tokens; it must have at least one")
    order, common = tree_order(sequences)
    leaves, leaf_of = _leaves(sequences, order, common)
    total = sum(len(sequences[at]) - alike for at, alike in leaves)
    forks = _Forks(rule.fork_tokens, None if rule.most is None else rule.most - total)
    for at, alike in leaves:
        forks.add(at, len(sequences[at]), alike)
    return _laid_out(sequences, forks.trees(), leaf_of)


def tree_order(sequences: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """The sequences in an order in which those that begin alike are neighbours, a shorter one before those that begin
    with it; and how many first tokens each has in common with the one before it in that order."""
    keys = [np.ascontiguousarray(ids, ">i4").tobytes() for ids in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    common = [0] * len(order)
    for place in range(1, len(order)):
        before, this = sequences[order[place - 1]], sequences[order[place]]
        length = min(len(before), len(this))
        differ = before[:length] != this[:length]
        first = int(differ.argmax()) if length else 0
        common[place] = first if length and differ[first] else length
    return order, common


def passes(sequences: Sequence[Ids], tokens: int, *, sharing: bool = True) -> Iterator[list[int]]:
    """The sequences of each forward pass over rows of at most `tokens` tokens or one sequence: those that begin alike
    together, where they are `sharing` these tokens, and else those of similar lengths. Of no sequences there is
    none."""
    if not sequences:  # there are fewer of them than ranks
        return
    order, common = tree_order(sequences) if sharing else (list(range(len(sequences))), [0] * len(sequences))
    begins = [place for place in range(len(order)) if not common[place]]
    trees = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(order)], strict=True)]
    trees.sort(key=lambda tree: max(len(sequences[order[place]]) for place in tree))
    part: list[int] = []
    size = 0
    for place in (place for tree in trees for place in tree):
        length = len(sequences[order[place]])
        if part and size + length - common[place] > tokens:
            yield part
            part, size = [], 0
        size += length - (common[place] if part else 0)
        part.append(order[place])
    if part:
        yield part


def _leaves(
    sequences: Sequence[Ids], order: list[int], common: list[int]
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """The sequences with which no other one begins (one of equal ones), each with what it has in common with the one
    before it; and for every sequence such a one that begins with it."""
    leaves: list[tuple[int, int]] = []
    leaf_of: dict[int, int] = {}
    waiting: list[int] = []
    alike = 0
    for place, at in enumerate(order):
        alike = min(alike, common[place]) if waiting else common[place]
        waiting.append(at)
        if place + 1 == len(order) or common[place + 1] < len(sequences[at]):
            leaves.append((at, alike if leaves else 0))
            leaf_of |= dict.fromkeys(waiting, at)
            waiting = []
    return leaves, leaf_of


@dataclass(slots=True)
class _Fork:
    """A place at which paths part, `depth` tokens from the beginning; a leaf has no branches, and ends there."""

    depth: int
    leaf: int = -1
    branches: list[_Fork] = field(default_factory=list)
    behind: int = 0

    def size(self, begin: int) -> int:
        """Tokens from `begin` on, those of its branches included."""
        return self.depth - begin + self.behind


class _Forks:
    """Builds the tree from leaves in `tree_order`. A fork is complete, and kept or not, when a leaf comes that has less
    in common with the one before."""

    def __init__(self, fork_tokens: int, spare: int | None) -> None:
        self._fork_tokens, self._spare = fork_tokens, spare
        self._open = [_Fork(0)]

    def add(self, leaf: int, length: int, common: int) -> None:
        """The next leaf: its length, and what it has in common with the one before."""
        self._close(common)
        self._open.append(_Fork(length, leaf))

    def trees(self) -> list[_Fork]:
        """All trees, once every leaf has been added."""
        self._close(0)
        return self._open[0].branches

    def _close(self, depth: int) -> None:
        """Completes whatever is open beyond a depth."""
        while self._open[-1].depth > depth:
            done = self._open.pop()
            if self._open[-1].depth < depth:
                self._open.append(_Fork(depth))
            parent = self._open[-1]
            branches = done.branches if self._is_copied(done, done.depth - parent.depth) else [done]
            parent.branches += branches
            parent.behind += sum(branch.size(parent.depth) for branch in branches)

    def _is_copied(self, fork: _Fork, own: int) -> bool:
        """Whether a fork's own tokens are copied into its branches."""
        more = (len(fork.branches) - 1) * own
        if more < 0 or more >= self._fork_tokens + MERGED_TOKEN_COST * fork.behind:
            return False
        if self._spare is not None:
            if more > self._spare:
                return False
            self._spare -= more
        return True


def _laid_out(sequences: Sequence[Ids], trees: list[_Fork], leaf_of: dict[int, int]) -> TokenRow:
    cuts: list[int] = [0]
    parents: list[int] = []
    shared: list[int] = []
    begins: list[int] = []
    ids, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    places: dict[int, Indices] = {}
    todo = [(tree, -1, np.empty(0, np.int64)) for tree in reversed(trees)]
    while todo:
        fork, parent, before = todo.pop()
        segment, begin, aside = len(parents), len(before), []
        while fork.branches:
            depth = fork.depth
            longest = max(fork.branches, key=lambda branch, depth=depth: branch.size(depth))  # type: ignore[misc]
            aside += [(branch, depth) for branch in fork.branches if branch is not longest]
            fork = longest
        end = cuts[-1] + fork.depth - begin
        found = np.concatenate([before, np.arange(cuts[-1], end)])
        parents.append(parent)
        shared.append(begin - begins[parent] if parent >= 0 else 0)
        begins.append(begin)
        cuts.append(end)
        ids.append(sequences[fork.leaf][begin:].astype(np.int64))
        positions.append(np.arange(begin, fork.depth))
        places[fork.leaf] = found
        todo += [(branch, segment, found[:depth]) for branch, depth in reversed(aside)]
    return TokenRow(
        ids=np.concatenate(ids),
        positions=np.concatenate(positions),
        tree=PrefixTree(tuple(cuts), tuple(parents), tuple(shared)),
        places=[places[leaf_of[at]][: len(tokens)] for at, tokens in enumerate(sequences)],
    )
