"""Copies of what a pool holds, for callers: later calls do not change them. The token bytes themselves are shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.data.block import TOKEN_BYTES, Record, StepExtra
from headrace.data.frame import Buffer
from headrace.data.trajectory import Group, Trajectory
from headrace.data.tree import TokenTree
from headrace.pool.channel import Channel
from headrace.pool.groups import OPEN, GroupState, TrajectoryState

_extras = msgspec.msgpack.Decoder(StepExtra)


@dataclass(slots=True)
class HandOut:
    """A batch before it is wrapped for its consumer."""

    channel: str
    lease: str
    deadline: float
    groups: Sequence[Group]


def unpack_metadata(packed: bytes) -> dict[str, Any]:
    """A trajectory's metadata, which is kept packed; empty where it has none."""
    return _extras.decode(packed).metadata if packed else {}


def trajectory_view(channel: Channel, trajectory: TrajectoryState, only: int | None = None) -> Trajectory:
    """A trajectory as it is; `only` one step of it, with its prompt whole."""
    blobs: dict[bytes, Buffer] = {}
    records: dict[int, Record] = {}
    for index, record in trajectory.tree.records.items() if only is None else ((only, trajectory.tree.records[only]),):
        copy = records[index] = Record(msgspec.structs.replace(record.head), record.ids, record.log_probs, record.blobs)
        if only is not None and copy.head.base >= 0:
            copy.ids = trajectory.tree.prompt(index) + record.response
            copy.head.n_prompt = len(copy.ids) // TOKEN_BYTES - copy.head.n_response
            copy.head.base, copy.head.keep = -1, 0
        for blob in record.blobs:
            blobs[blob.digest] = blob.data
    group = trajectory.group
    state = "leased" if group.lease else "consumed" if group.consumed else "queued"
    return Trajectory(
        uid=trajectory.uid,
        prompt_uid=group.uid,
        channel=channel.name,
        complete=trajectory.last != OPEN and len(trajectory.tree) == trajectory.last + 1,
        metadata=unpack_metadata(trajectory.metadata),
        tree=TokenTree(records),
        blobs=blobs,
        n_rollouts=trajectory.n_rollouts,
        state=state,
    )


def group_view(channel: Channel, group: GroupState, *, replayed: bool) -> Group:
    """A group as it is; `replayed`: it was consumed before, and comes from the channel's history."""
    return Group(
        prompt_uid=group.uid,
        trajectories=tuple([trajectory_view(channel, trajectory) for trajectory in group.trajectories.values()]),
        deliveries=group.deliveries,
        replayed=replayed,
        partial=group.partial,
        oldest_version=group.oldest or 0,
    )


def step_views(channel: Channel, steps: list[tuple[TrajectoryState, int]]) -> list[Group]:
    """Single steps, each as a group of its own with one trajectory of one step."""
    return [
        Group(
            prompt_uid=trajectory.group.uid,
            trajectories=(trajectory_view(channel, trajectory, only=index),),
            deliveries=(trajectory.deliveries or {}).get(index, 1),
            oldest_version=trajectory.tree.records[index].head.policy_version,
        )
        for trajectory, index in steps
    ]
