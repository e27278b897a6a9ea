"""What facts do to scored groups. A fact about what is not there (a repair's hole) is counted and passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.data.block import Block
from headrace.data.scored.piece import Piece
from headrace.pool.channel import Channel
from headrace.pool.facts import Fact
from headrace.pool.scored import facts as f
from headrace.pool.scored import snapshot
from headrace.pool.scored.groups import BatchLease, ScoredGroups


class PoolState(Protocol):
    """What a fact about scored groups may touch of the pool's state."""

    scored: ScoredGroups
    next_cursor: int

    def channel(self, name: str) -> Channel: ...

    def record(self, kind: str, channel: str, at: float, **detail: Any) -> None:
        """Puts an event into the pool's list of them."""

    def orphan(self, fact: Fact) -> None:
        """Counts a fact about what is not there."""


def _registered(state: PoolState, _: None, fact: f.TrainerRegistered, block: Block | None) -> None:
    state.scored.register(fact.uuid, fact.registration, fact.step, by_fetch=fact.by_fetch)
    state.record("trainer", "", fact.at, settings=fact.registration is not None, step=state.scored.step)


def _started(state: PoolState, _: None, fact: f.TrainerStarted, block: Block | None) -> None:
    state.scored.started, state.scored.training_ended = True, False


def _ended(state: PoolState, _: None, fact: f.TrainerEnded, block: Block | None) -> None:
    state.scored.end_training()
    state.record("trainer_ended", "", fact.at, step=state.scored.step)


def _fetched(state: PoolState, channel: Channel, fact: f.BatchFetched, block: Block | None) -> None:
    state.scored.count_fetch(fact.lease)


def _joined(state: PoolState, _: None, fact: f.EnvJoined, block: Block | None) -> None:
    assert fact.registration is not None
    state.scored.join(fact.env, fact.registration, fact.name, fact.request, fact.at)
    _wake_served(state)  # its group size may have let some out of a buffer
    state.record("environment", "", fact.at, env=fact.env, name=fact.name, connected=True)


def _left(state: PoolState, _: None, fact: f.EnvLeft, block: Block | None) -> None:
    if fact.env not in state.scored.environments:
        return state.orphan(fact)
    state.scored.leave(fact.env)
    state.record("environment", "", fact.at, env=fact.env, connected=False)


def _posted(state: PoolState, _: None, fact: f.GroupsPosted, block: Block | None) -> None:
    assert block is not None
    scored = state.scored
    scored.answers = []
    for entry in fact.groups:
        if scored.batching.knows(entry.number):
            state.orphan(fact)
            continue
        data = block.blobs[f.blob_name(entry.number)]
        scored.answers.append(scored.take(entry, Piece(bytes(data), entry.size, entry.crc), fact.at))
    _wake_served(state)


def _wake_served(state: PoolState) -> None:
    """Groups may have entered the queue: who waits in the channel that is served may take them."""
    if state.scored.serving is not None:
        state.channel(state.scored.serving).changed = True


def _forgot(state: PoolState, _: None, fact: f.KeysForgotten, block: Block | None) -> None:
    state.scored.forget_keys(fact.keys)


def _handed_out(state: PoolState, _: None, fact: f.BatchHandedOut, block: Block | None) -> None:
    scored = state.scored
    for number in fact.groups:
        if scored.batching.is_out(number):
            state.orphan(fact)
            scored.free(number)
    there = tuple(number for number in fact.groups if scored.batching.is_queued(number))
    if len(there) < len(fact.groups):
        state.orphan(fact)
    scored.hand_out(BatchLease(fact.lease, fact.deadline, fact.request, there))


def _acked(state: PoolState, _: None, fact: f.BatchAcked, block: Block | None) -> None:
    lease = state.scored.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    state.scored.ack(lease)


def _returned(state: PoolState, _: None, fact: f.BatchReturned, block: Block | None) -> None:
    lease = state.scored.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    state.scored.give_back(lease)
    _wake_served(state)
    state.record("redelivery", "", fact.at, lease=fact.lease, reason=fact.reason)


def _received(state: PoolState, _: None, fact: f.BatchReceived, block: Block | None) -> None:
    if fact.lease not in state.scored.returned:
        return state.orphan(fact)
    state.scored.receive(fact.lease)
    state.record("received", "", fact.at, lease=fact.lease)


def _dropped(state: PoolState, _: None, fact: f.GroupsDropped, block: Block | None) -> None:
    for number in fact.groups:
        if not state.scored.batching.knows(number):
            state.orphan(fact)
            continue
        state.record("dead_letter", "", fact.at, group=number, why=fact.kind, reason=fact.reason)
    state.scored.drop(fact.groups, fact.kind, fact.reason)


def _moved(state: PoolState, _: None, fact: f.GroupsMoved, block: Block | None) -> None:
    state.scored.move(fact.groups)


def _serving(state: PoolState, channel: Channel | None, fact: f.ChannelServed, block: Block | None) -> None:
    state.scored.serve(fact.channel or None)
    if channel is not None:
        channel.changed = True  # who waits there may take what is posted here
    state.record("serving", fact.channel, fact.at)


def _reset(state: PoolState, _: None, fact: f.ScoredReset, block: Block | None) -> None:
    state.scored.reset()
    state.record("desk_reset", "", fact.at)


def _scored_image(state: PoolState, _: None, fact: f.ScoredImage, block: Block | None) -> None:
    snapshot.restore(state.scored, fact)
    state.next_cursor = max(state.next_cursor, fact.cursor)


def _pieces_image(state: PoolState, _: None, fact: f.PiecesImage, block: Block | None) -> None:
    assert block is not None
    for entry in fact.groups:
        if state.scored.batching.knows(entry.number) and entry.number not in state.scored.pieces:
            data = bytes(block.blobs[f.blob_name(entry.number)])
            state.scored.pieces.put(entry.number, Piece(data, entry.size, entry.crc))
        else:
            state.orphan(fact)


APPLY: dict[type, Callable[..., None]] = {
    f.TrainerRegistered: _registered,
    f.TrainerStarted: _started,
    f.TrainerEnded: _ended,
    f.BatchFetched: _fetched,
    f.EnvJoined: _joined,
    f.EnvLeft: _left,
    f.GroupsPosted: _posted,
    f.KeysForgotten: _forgot,
    f.BatchHandedOut: _handed_out,
    f.BatchAcked: _acked,
    f.BatchReturned: _returned,
    f.BatchReceived: _received,
    f.GroupsDropped: _dropped,
    f.GroupsMoved: _moved,
    f.ChannelServed: _serving,
    f.ScoredReset: _reset,
    f.ScoredImage: _scored_image,
    f.PiecesImage: _pieces_image,
}
