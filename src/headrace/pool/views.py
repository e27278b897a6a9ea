"""Copies of what a pool holds, for callers: later calls do not change them. The token bytes themselves are shared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.data.block import TOKEN_BYTES, Blob, Record, StepExtra
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


class MustLoad(Exception):
    """The answer needs payloads that are not in memory: read these, with nothing held, and plan again."""

    def __init__(self, records: list[Record], blobs: list[Blob]) -> None:
        super().__init__(f"{len(records)} steps and {len(blobs)} blobs")
        self.records = records
        self.blobs = blobs


def unpack_metadata(packed: bytes) -> dict[str, Any]:
    """A trajectory's metadata, which is kept packed; empty where it has none."""
    return _extras.decode(packed).metadata if packed else {}


def trajectory_view(channel: Channel, trajectory: TrajectoryState, only: int | None = None) -> Trajectory:
    """A trajectory as it is; `only` one step of it, with its prompt whole."""
    blobs: dict[bytes, Buffer] = {}
    records: dict[int, Record] = {}
    for index, record in trajectory.tree.records.items() if only is None else ((only, trajectory.tree.records[only]),):
        head, (ids, log_probs) = msgspec.structs.replace(record.head), record.arrays()
        if only is not None and head.base >= 0:
            ids = trajectory.tree.prompt(index) + ids[head.n_prompt * TOKEN_BYTES :]
            head.n_prompt = len(ids) // TOKEN_BYTES - head.n_response
            head.base, head.keep = -1, 0
        records[index] = Record(head, ids, log_probs, record.blobs)
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


def check_loaded(trajectories: Iterable[TrajectoryState]) -> None:
    """`MustLoad` where payloads of trajectories are not in memory: a view would read them with the pool held still, and
    find damage when it is too late."""
    _check_loaded([record for trajectory in trajectories for record in trajectory.tree.records.values()])


def check_steps_loaded(steps: Iterable[tuple[TrajectoryState, int]]) -> None:
    """The same for single steps: what their prompts are made of."""
    _check_loaded([record for trajectory, index in steps for record in with_bases(trajectory.tree, index)])


def with_bases(tree: TokenTree, index: int) -> Iterator[Record]:
    """A step, and those that its prompt is made of."""
    while index >= 0:
        record = tree.records[index]
        yield record
        index = record.head.base


def check_arrays_loaded(records: Iterable[Record]) -> None:
    """`MustLoad` where ids and log-probs of records are not in memory, for who looks at nothing else of them."""
    missing = {id(record): record for record in records if record.ids_in_memory is None}
    if missing:
        raise MustLoad(list(missing.values()), [])


def _check_loaded(records: list[Record]) -> None:
    missing = [record for record in records if record.ids_in_memory is None]
    blobs = {blob.digest: blob for record in records for blob in record.blobs if blob.in_memory is None}
    if missing or blobs:
        raise MustLoad(missing, list(blobs.values()))


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
