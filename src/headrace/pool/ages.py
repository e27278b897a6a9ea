"""Groups in order of age, for queues in which nearly all come at the end and go from the beginning.

Adding the youngest and discarding any cost the same however many there are, and far less than in a balanced tree. A
discarded number keeps its place in the list until half of the list is such; added again before that, it is simply alive
again, in its old place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

#: Dead entries that are not worth sweeping up.
FEW = 1024


class ByAge:
    """A set of sequence numbers that iterates in rising order."""

    __slots__ = ("_alive", "_first", "_seqs")

    def __init__(self) -> None:
        self._seqs: list[int] = []  # rising; the dead among them are not in `_alive`
        self._alive: set[int] = set()
        self._first = 0  # nothing before this position is alive

    def __len__(self) -> int:
        return len(self._alive)

    def __contains__(self, seq: int) -> bool:
        return seq in self._alive

    def __iter__(self) -> Iterator[int]:
        seqs, alive = self._seqs, self._alive
        at = self._first
        while at < len(seqs) and seqs[at] not in alive:
            at += 1
        self._first = at
        for position in range(at, len(seqs)):
            if seqs[position] in alive:
                yield seqs[position]

    def __reversed__(self) -> Iterator[int]:
        while self._seqs and self._seqs[-1] not in self._alive:
            self._seqs.pop()
        self._first = min(self._first, len(self._seqs))
        for position in range(len(self._seqs) - 1, self._first - 1, -1):
            if self._seqs[position] in self._alive:
                yield self._seqs[position]

    @property
    def first(self) -> int | None:
        """The oldest, None where there is none."""
        return next(iter(self), None)

    def add(self, seq: int) -> None:
        if seq in self._alive:
            return
        self._alive.add(seq)
        seqs = self._seqs
        if not seqs or seq > seqs[-1]:
            seqs.append(seq)
            return
        at = bisect_left(seqs, seq)
        if seqs[at] != seq:
            insort(seqs, seq, at)
        self._first = min(self._first, at)

    def discard(self, seq: int) -> None:
        self._alive.discard(seq)
        if len(self._seqs) > 2 * len(self._alive) + FEW:
            self._seqs = [kept for kept in self._seqs if kept in self._alive]
            self._first = 0
