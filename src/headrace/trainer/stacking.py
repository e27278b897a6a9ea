"""Rows of different lengths in few rectangles: which of them are padded to one length, so that one call of a kernel
computes them together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

#: What one more call costs, in units of attending one token to one token; measured forward and backward on a CPU.
CALL_COST = 12_000
#: The same of one padding token, besides what it attends to: it is copied to its place and away.
PADDING_TOKEN_COST = 30


def by_length(lengths: Indices) -> list[Indices]:
    """The rows of each stack, longest first, so that the sum of the stacks' costs is least."""
    if not len(lengths):
        return []
    order = np.argsort(-lengths, kind="stable")
    return np.split(order, _borders(lengths[order]))


def padded_places(begins: Indices, lengths: Indices, members: Indices) -> Indices:
    """For each place of one stack the token that stands there, [rows, length]; padding repeats a row's last token."""
    inside = np.minimum(np.arange(lengths[members].max()), lengths[members, None] - 1)
    return begins[members, None] + inside


def _borders(lengths: Indices) -> list[int]:
    """Where to split sequences, sorted by falling length, into stacks so that the sum of their costs is least."""
    firsts = np.flatnonzero(np.diff(lengths, prepend=lengths[0] + 1))  # one of each length: equals stay together
    ends = np.append(firsts[1:], len(lengths))
    a_row = lengths[firsts] * (lengths[firsts] + PADDING_TOKEN_COST)
    least = np.zeros(len(firsts) + 1)  # least[i]: of everything before the i-th length
    before = np.zeros(len(firsts) + 1, np.int64)  # where the last stack of that begins
    for i in range(len(firsts)):
        costs = least[: i + 1] + CALL_COST + a_row[: i + 1] * (ends[i] - firsts[: i + 1])
        before[i + 1] = int(costs.argmin())
        least[i + 1] = costs[before[i + 1]]
    borders, at = [], before[-1]
    while at > 0:
        borders.append(int(firsts[at]))
        at = before[at]
    return borders[::-1]
