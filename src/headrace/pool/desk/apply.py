"""What the desk's facts do to a state. A fact about what is not there (a repair's hole) is counted and passed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.data.block import Block
from headrace.data.scored.piece import Piece
from headrace.pool.desk import facts as f
from headrace.pool.desk import image
from headrace.pool.desk.desk import Lease

if TYPE_CHECKING:
    from headrace.pool.channel import Channel
    from headrace.pool.state import State


def _registered(state: State, _: None, fact: f.Registered, block: Block | None) -> None:
    state.desk.register(fact.uuid, fact.registration, fact.step)
    state.record("trainer", "", fact.at, settings=fact.registration is not None, step=state.desk.step)


def _started(state: State, _: None, fact: f.Started, block: Block | None) -> None:
    state.desk.started = True


def _joined(state: State, _: None, fact: f.Joined, block: Block | None) -> None:
    assert fact.registration is not None
    state.desk.join(fact.env, fact.registration, fact.name, fact.request, fact.at)
    _tell(state)  # its group size may have let some out of a buffer
    state.record("environment", "", fact.at, env=fact.env, name=fact.name, connected=True)


def _left(state: State, _: None, fact: f.Left, block: Block | None) -> None:
    if fact.env not in state.desk.environments:
        return state.orphan(fact)
    state.desk.leave(fact.env)
    state.record("environment", "", fact.at, env=fact.env, connected=False)


def _posted(state: State, _: None, fact: f.Posted, block: Block | None) -> None:
    assert block is not None
    desk = state.desk
    desk.answers = []
    for entry in fact.groups:
        if desk.batching.knows(entry.number):
            state.orphan(fact)
            continue
        data = block.blobs[f.blob_name(entry.number)]
        desk.answers.append(desk.take(entry, Piece(bytes(data), entry.size, entry.crc), fact.at))
    _tell(state)


def _tell(state: State) -> None:
    """Groups may have entered the queue: who waits in the channel that is served may take them."""
    if state.desk.serving is not None:
        state.channel(state.desk.serving).changed = True


def _forgot(state: State, _: None, fact: f.Forgot, block: Block | None) -> None:
    state.desk.forget_keys(fact.keys)


def _handed_out(state: State, _: None, fact: f.HandedOut, block: Block | None) -> None:
    desk = state.desk
    for number in fact.groups:
        if desk.batching.is_out(number):
            state.orphan(fact)
            desk.free(number)
    there = tuple(number for number in fact.groups if desk.batching.is_queued(number))
    if len(there) < len(fact.groups):
        state.orphan(fact)
    desk.hand_out(Lease(fact.lease, fact.deadline, fact.request, there))


def _acked(state: State, _: None, fact: f.Acked, block: Block | None) -> None:
    lease = state.desk.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    state.desk.ack(lease)


def _returned(state: State, _: None, fact: f.Returned, block: Block | None) -> None:
    lease = state.desk.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    state.desk.give_back(lease)
    _tell(state)
    state.record("redelivery", "", fact.at, lease=fact.lease, reason=fact.reason)


def _received(state: State, _: None, fact: f.Received, block: Block | None) -> None:
    if fact.lease not in state.desk.returned:
        return state.orphan(fact)
    state.desk.receive(fact.lease)
    state.record("received", "", fact.at, lease=fact.lease)


def _dropped(state: State, _: None, fact: f.Dropped, block: Block | None) -> None:
    for number in fact.groups:
        if not state.desk.batching.knows(number):
            state.orphan(fact)
            continue
        state.record("dead_letter", "", fact.at, group=number, why=fact.kind, reason=fact.reason)
    state.desk.drop(fact.groups, fact.kind, fact.reason)


def _moved(state: State, _: None, fact: f.Moved, block: Block | None) -> None:
    state.desk.move(fact.groups)


def _serving(state: State, channel: Channel | None, fact: f.Serving, block: Block | None) -> None:
    state.desk.serving = fact.channel or None
    if channel is not None:
        channel.changed = True  # who waits there may take what the desk has
    state.record("serving", fact.channel, fact.at)


def _reset(state: State, _: None, fact: f.Reset, block: Block | None) -> None:
    state.desk.reset()
    state.record("desk_reset", "", fact.at)


def _desk_image(state: State, _: None, fact: f.DeskImage, block: Block | None) -> None:
    image.restore(state.desk, fact)
    state.next_cursor = max(state.next_cursor, fact.cursor)


def _pieces_image(state: State, _: None, fact: f.PiecesImage, block: Block | None) -> None:
    assert block is not None
    for entry in fact.groups:
        if state.desk.batching.knows(entry.number) and entry.number not in state.desk.shelf:
            data = bytes(block.blobs[f.blob_name(entry.number)])
            state.desk.shelf.put(entry.number, Piece(data, entry.size, entry.crc))
        else:
            state.orphan(fact)


APPLY: dict[type, Callable[..., None]] = {
    f.Registered: _registered,
    f.Started: _started,
    f.Joined: _joined,
    f.Left: _left,
    f.Posted: _posted,
    f.Forgot: _forgot,
    f.HandedOut: _handed_out,
    f.Acked: _acked,
    f.Returned: _returned,
    f.Received: _received,
    f.Dropped: _dropped,
    f.Moved: _moved,
    f.Serving: _serving,
    f.Reset: _reset,
    f.DeskImage: _desk_image,
    f.PiecesImage: _pieces_image,
}
