"""The pool's wire: a call and its answer, each one frame. Ray carries it in an actor call, HTTP in a body.

A call is its operation's name, its arguments and, for a submit, the steps as a block. An answer is a value, or groups
with their steps as a block, or an error that is raised again on the caller's side as what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.data import frame
from headrace.data.block import (
    Block,
    BlockHeader,
    Record,
    block_layout,
    decoded,
    no_extension,
    read_block,
    to_plain,
)
from headrace.data.errors import FrameError, HeadraceError
from headrace.data.packing import check_heads, check_values, inherit_metadata, unpack_block
from headrace.data.step import Step
from headrace.data.trajectory import Group, Trajectory
from headrace.data.tree import TokenTree
from headrace.pool.config import ChannelConfig
from headrace.pool.errors import UnreadableAnswer
from headrace.pool.operation import Completion, Receipt
from headrace.pool.state import Event
from headrace.pool.views import HandOut

#: The media type of a frame in an HTTP body.
FRAME_TYPE = "application/vnd.headrace.frame"


class WireCall(msgspec.Struct, array_like=True):
    """A call: its operation, its arguments, and the layout of the steps that follow it."""

    op: str
    args: dict[str, Any]
    block: BlockHeader | None = None


class TrajectoryHead(msgspec.Struct, array_like=True):
    """A trajectory of a group: all but its steps."""

    uid: str
    prompt_uid: str
    channel: str
    complete: bool
    metadata: dict[str, Any]
    n_rollouts: int | None
    state: str
    steps: int


class GroupHead(msgspec.Struct, array_like=True):
    """A group in an answer: all but its steps."""

    prompt_uid: str
    deliveries: int
    replayed: bool
    partial: bool
    oldest_version: int
    trajectories: list[TrajectoryHead]


class Reply(msgspec.Struct, array_like=True):
    """`kind` says what the value is: plain, error, receipt, completion, config, event list, hand-out, trajectory."""

    kind: str
    value: Any = None
    groups: list[GroupHead] | None = None
    block: BlockHeader | None = None


_calls = msgspec.msgpack.Decoder(WireCall, ext_hook=no_extension)
_replies = msgspec.msgpack.Decoder(Reply, ext_hook=no_extension)
_encode = msgspec.msgpack.Encoder(enc_hook=to_plain).encode
_STRUCTS: dict[str, type] = {"receipt": Receipt, "completion": Completion, "config": ChannelConfig}


def encode_call(op: str, args: dict[str, Any], block: Block | None = None) -> bytes:
    """A call as a frame."""
    header = _encode(WireCall(op, args, block.header() if block else None))
    return frame.frame_bytes(frame.FrameKind.MESSAGE, header, block.body() if block else ())


def decode_call(data: frame.Buffer) -> tuple[str, dict[str, Any], Block | None]:
    """An operation, its arguments and its steps; `FrameError` or `InvalidInput` where a frame or a step is wrong."""
    message = _message(data)
    call = decoded(_calls, message.header, "a call")
    if call.block is None:
        return call.op, call.args, None
    block = read_block(call.block, message.body)
    check_heads(block)
    check_values(block)
    return call.op, call.args, block


def encode_reply(value: Any) -> bytes:
    """An answer as a frame."""
    if isinstance(value, HandOut):
        heads, block, body = _pack_groups(value.groups)
        reply = Reply("handout", [value.channel, value.lease, value.deadline], heads, block)
        return frame.frame_bytes(frame.FrameKind.MESSAGE, _encode(reply), body)
    if isinstance(value, Trajectory):
        heads, block, body = _pack_groups([Group(value.prompt_uid, (value,))])
        return frame.frame_bytes(frame.FrameKind.MESSAGE, _encode(Reply("trajectory", None, heads, block)), body)
    kind = "plain"
    for name, struct in _STRUCTS.items():
        if type(value) is struct:
            kind = name
    if isinstance(value, list) and value and isinstance(value[0], Event):
        kind = "events"
    return frame.frame_bytes(frame.FrameKind.MESSAGE, _encode(Reply(kind, value)))


def encode_error(error: HeadraceError) -> bytes:
    """An error as a frame."""
    return frame.frame_bytes(frame.FrameKind.MESSAGE, _encode(Reply("error", [error.code, str(error)])))


def decode_reply(data: frame.Buffer) -> Any:
    """The answer's value; an error is raised. `UnreadableAnswer` for what no pool of this release answers."""
    try:
        message = _message(data)
        reply = decoded(_replies, message.header, "an answer")
        if reply.kind != "error":
            return _answered(reply, message.body)
        code, said = _converted(reply.value, tuple[str, str])
    except FrameError as error:
        raise UnreadableAnswer(f"the pool's answer cannot be read: {error}") from None
    raise HeadraceError.from_wire(code, said)


def _answered(reply: Reply, body: memoryview) -> Any:
    """What an answer that is no error holds; `FrameError` where it cannot."""
    if reply.kind in ("handout", "trajectory"):
        if reply.groups is None or reply.block is None:
            raise FrameError(f"an answer of the kind {reply.kind!r} without groups, or without their steps")
        groups = PackedGroups(reply.groups, read_block(reply.block, body))
        if reply.kind == "trajectory":
            if [len(head.trajectories) for head in reply.groups] != [1]:
                raise FrameError("an answer that should hold one trajectory, and holds none or several")
            return groups[0].trajectories[0]
        channel, lease, deadline = _converted(reply.value, tuple[str, str, float])
        return HandOut(channel, lease, deadline, groups)
    if reply.kind == "events":
        return _converted(reply.value, list[Event])
    struct = _STRUCTS.get(reply.kind)
    return reply.value if struct is None else _converted(reply.value, struct)


def _converted(value: Any, kind: Any) -> Any:
    """A part of an answer as what it should be; `FrameError` where it is something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FrameError(f"an answer cannot be read: {error}") from None


def encode_groups(groups: Sequence[Group]) -> bytes:
    """Groups alone as a frame."""
    return encode_reply(HandOut("", "", 0.0, groups))


def decode_groups(data: frame.Buffer) -> Sequence[Group]:
    """What `encode_groups` made a frame of."""
    found: HandOut = decode_reply(data)
    return found.groups


class PackedGroups(Sequence[Group]):
    """Groups as they came over the wire, unpacked when one is looked at: a trainer may want nothing but steps."""

    def __init__(self, heads: list[GroupHead], block: Block) -> None:
        counts = [trajectory.steps for head in heads for trajectory in head.trajectories]
        steps = sum(counts)
        if steps != len(block.heads) or min(counts, default=0) < 0:
            raise FrameError(f"the groups speak of {steps} steps, the block holds {len(block.heads)}")
        self._heads = heads
        self._block = block
        self._groups: list[Group] | None = None

    def __len__(self) -> int:
        return len(self._heads)

    def __getitem__(self, at: Any) -> Any:
        if self._groups is None:
            self._groups = _unpack_groups(self._heads, self._block)
        return self._groups[at]

    def steps(self) -> list[Step]:
        """Every step but quarantined ones, group by group. Where prompts came whole, arrays are views of the answer."""
        if any([head.base >= 0 for head in self._block.heads]):
            return [step for group in self for step in group.steps]
        steps = unpack_block(self._block)
        first = 0
        for trajectory in [trajectory for head in self._heads for trajectory in head.trajectories]:
            inherit_metadata(steps[first : first + trajectory.steps], trajectory.metadata)
            first += trajectory.steps
        return [step for step in steps if step.quarantined is None]


def _message(data: frame.Buffer) -> frame.Frame:
    message = frame.decode(data)
    if message.kind != frame.FrameKind.MESSAGE:
        raise FrameError(f"a frame of kind {message.kind} where a message was expected")
    if message.size != len(data):
        raise FrameError(f"{len(data) - message.size} bytes follow the message")
    return message


def _pack_groups(groups: Sequence[Group]) -> tuple[list[GroupHead], BlockHeader, list[frame.Buffer]]:
    heads: list[GroupHead] = []
    records: list[Record] = []
    blobs: dict[bytes, frame.Buffer] = {}
    for group in groups:
        members = []
        for t in group.trajectories:
            records.extend(t.tree.in_order())
            blobs.update(t.blobs)
            members.append(
                TrajectoryHead(t.uid, t.prompt_uid, t.channel, t.complete, t.metadata, t.n_rollouts, t.state, len(t))
            )
        heads.append(
            GroupHead(group.prompt_uid, group.deliveries, group.replayed, group.partial, group.oldest_version, members)
        )
    return heads, *block_layout(records, blobs)


def _check_base(record: Record, tree: TokenTree) -> None:
    """`FrameError` where a record builds on what does not stand before it: there a walk to the root might not end."""
    head = record.head
    base = tree.records.get(head.base)
    if head.step_index in tree.records or (head.base >= 0 and (base is None or head.keep > base.end)):
        raise FrameError(
            f"step {head.step_index} of {head.trajectory_uid!r} stands there twice, or builds on {head.keep} tokens of "
            f"step {head.base}, which are not there"
        )


def _unpack_groups(heads: list[GroupHead], block: Block) -> list[Group]:
    records = iter(block.records())
    groups = []
    for head in heads:
        members = []
        for t in head.trajectories:
            tree = TokenTree()
            for _ in range(t.steps):
                record: Record = next(records)
                _check_base(record, tree)
                tree.add(record)
            members.append(
                Trajectory(
                    t.uid, t.prompt_uid, t.channel, t.complete, t.metadata, tree, block.blobs, t.n_rollouts, t.state
                )
            )
        groups.append(
            Group(head.prompt_uid, tuple(members), head.deliveries, head.replayed, head.partial, head.oldest_version)
        )
    return groups
