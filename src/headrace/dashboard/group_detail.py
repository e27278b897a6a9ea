"""One group as a whole: the tokens that its trajectories share, and where its best leaves its worst. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dashboard.branches import branch_messages, shown_message
from headrace.dashboard.records import ShownMessage
from headrace.data.trajectory import Trajectory
from headrace.rewards.recorded import SampleReader

Ids = npt.NDArray[np.integer[Any]]

#: Sequences of a group that its tree is made of, and trajectories that are read for it.
MAX_SEQUENCES, MAX_TRAJECTORIES = 256, 64
#: Characters of a message that are shown where two differ.
MAX_CHARACTERS = 2_000


class PrefixNode(msgspec.Struct, frozen=True):
    """A run of tokens, `start` to `end` of their sequences, that `count` leaves from `first` on have in common."""

    start: int
    end: int
    first: int
    count: int


class PrefixShare(msgspec.Struct, frozen=True):
    """What sequences share, as a tree. `computed` tokens are in it, `tokens` would be without sharing; `leaves` are the
    trajectories of its sequences, in its order."""

    tokens: int
    computed: int
    nodes: list[PrefixNode]
    leaves: list[str]
    left_out: int = 0


class FirstDifference(msgspec.Struct, frozen=True):
    """Where two conversations part: message `at` of each, None where one has ended by then."""

    best: str
    worst: str
    best_reward: float
    worst_reward: float
    at: int
    best_message: ShownMessage | None
    worst_message: ShownMessage | None


class GroupDetail(msgspec.Struct, frozen=True):
    """One group: what its trajectories share, and what sets its best apart; `why_none` says why that is not told."""

    prefix: PrefixShare
    difference: FirstDifference | None
    why_none: str | None = None


def group_detail(trajectories: Sequence[Trajectory], reader: SampleReader | None) -> GroupDetail:
    """What is told of a group's trajectories."""
    share = prefix_share(
        [(sequence.trajectory_uid, sequence.tokens) for one in trajectories for sequence in one.sequences()]
    )
    rewarded = sorted((one for one in trajectories if one.reward is not None), key=lambda one: one.reward or 0.0)
    if len(rewarded) < 2 or rewarded[0].reward == rewarded[-1].reward:
        return GroupDetail(share, None, "its rewards are all the same")
    if reader is None:
        return GroupDetail(share, None, "no tokenizer is known here")
    worst, best = rewarded[0], rewarded[-1]
    try:
        talks = [branch_messages(one, max(one.tree.records), reader) for one in (best, worst)]
    except Exception as error:  # templates and parsers of strangers may raise anything
        return GroupDetail(share, None, f"it cannot be read back: {type(error).__name__}: {error}"[:500])
    at = next((n for n, (a, b) in enumerate(zip(*talks, strict=False)) if a != b), min(map(len, talks)))
    shown = [shown_message(talk[at], MAX_CHARACTERS) if at < len(talk) else None for talk in talks]
    return GroupDetail(
        share, FirstDifference(best.uid, worst.uid, best.reward or 0.0, worst.reward or 0.0, at, shown[0], shown[1])
    )


def prefix_share(sequences: Sequence[tuple[str, Ids]]) -> PrefixShare:
    """The tree of sequences that begin alike; of more than `MAX_SEQUENCES` the first."""
    ordered = sorted(sequences[:MAX_SEQUENCES], key=lambda one: one[1].astype(">i4").tobytes())
    ids = [np.asarray(tokens) for _, tokens in ordered]
    shared = [_common(one, other) for one, other in pairwise(ids)]
    nodes = list(_nodes([len(one) for one in ids], shared, 0, len(ids), 0)) if ids else []
    return PrefixShare(
        tokens=sum(map(len, ids)),
        computed=sum(node.end - node.start for node in nodes),
        nodes=nodes,
        leaves=[uid for uid, _ in ordered],
        left_out=max(0, len(sequences) - MAX_SEQUENCES),
    )


def _nodes(lengths: Sequence[int], shared: Sequence[int], first: int, end: int, start: int) -> Iterator[PrefixNode]:
    """The nodes of sequences `first` to `end`, which have `start` tokens in common already. `shared[i]` is how many
    tokens sequence i has in common with the next; sorted sequences have the least of those between them."""
    waiting = [(first, end, start)]
    while waiting:
        low, high, begun = waiting.pop()
        if high - low == 1:
            if lengths[low] > begun:
                yield PrefixNode(begun, lengths[low], low, 1)
            continue
        common = min(shared[low : high - 1])
        if common > begun:
            yield PrefixNode(begun, common, low, high - low)
        cuts = [low, *(at + 1 for at in range(low, high - 1) if shared[at] == common), high]
        waiting += [(a, b, common) for a, b in pairwise(cuts)][::-1]


def _common(first: Ids, second: Ids) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length
