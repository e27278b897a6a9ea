"""Groups that move between scored groups and the one channel that is served, where either has too few.

A group that moves leaves the one and enters the other in one record of the journal: whatever happens, it is in exactly
one. It moves only where the move makes up what was asked for, and only if it can be expressed as the other's kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from headrace.data.block import Block, StepHead
from headrace.data.errors import InvalidInput
from headrace.data.frame import Buffer
from headrace.data.packing import pack
from headrace.data.scored import ScoredGroup, from_sequences, to_steps
from headrace.pool import facts, policies
from headrace.pool.channel import Channel
from headrace.pool.groups import GroupState, TrajectoryState
from headrace.pool.operation import Plan
from headrace.pool.operations.submit import plan_submit
from headrace.pool.scored.facts import GroupsMoved, GroupsPosted, PostedGroup, blob_name
from headrace.pool.scored.subset_sums import sums
from headrace.pool.state import State
from headrace.pool.views import check_loaded, trajectory_view

log = logging.getLogger("headrace.pool")

#: How the prompts' uids of groups begin that were moved into a channel.
MOVED_PREFIX = "desk/"
#: Batches' worth of scored sequences beyond which no more are brought from a channel: by then a batch is filled by age.
ENOUGH_BATCHES = 2


# -- into the channel --------------------------------------------------------------------------------------------------


def into_channel(state: State, channel: Channel, wanted: int, unit: str, now: float) -> Plan | None:
    """Moves the oldest scored groups into the channel, so many of them or of their sequences (of which each is a step
    or more), after which to plan again; None where it cannot."""
    batching = state.scored.batching
    queued = len(batching) if unit == "group" else sum(size * n for size, n in batching.sizes().items())
    if channel.closed or queued < wanted or len(channel.groups) + wanted > channel.config.max_queue_size:
        return None
    if _is_on_its_way(channel):
        return None
    moved: list[int] = []
    blocks: list[Block] = []
    for number in batching.oldest_first():
        block = _as_steps(state, channel, number)
        if block is None:
            continue
        moved.append(number)
        blocks.append(block)
        wanted -= 1 if unit == "group" else batching.size(number)
        if wanted <= 0:
            return _plan_into_channel(state, channel, moved, _joined(blocks), now)
    return None


def _is_on_its_way(channel: Channel) -> bool:
    """Whether a group that was brought before waits for its grace to end, after which a fetch may have enough. Graces
    of what agents completed do not count: some agent completes something all the time."""
    ended = (channel.trajectories.get(uid) for _, uid in channel.grace_deadlines)
    return any(one is not None and not one.counted and one.group.uid.startswith(MOVED_PREFIX) for one in ended)


def _as_steps(state: State, channel: Channel, number: int) -> Block | None:
    """A scored group as steps; None for one that only `desk_batch` can serve, of which the first of its kind is
    logged."""
    scored, prompt = state.scored, f"{MOVED_PREFIX}{number}"
    if scored.is_unmovable(number):
        return None
    try:
        block = pack(to_steps(scored.pieces.piece(number), prompt))
    except InvalidInput as error:
        why = str(error)
    else:
        if prompt not in channel.open_groups and not any(_known(channel, one.trajectory_uid) for one in block.heads):
            return block
        why = f"channel {channel.name!r} has had {prompt!r}, or a trajectory of it, from somebody else"
    if scored.note_unmovable(number, why):
        log.warning("a scored group cannot be fetched from channel %r, and waits for desk_batch: %s", channel.name, why)
    return None


def _known(channel: Channel, uid: str) -> bool:
    return uid in channel.trajectories or uid in channel.tombstones


def _joined(blocks: list[Block]) -> Block:
    heads: list[StepHead] = []
    blobs: dict[bytes, Buffer] = {}
    for block in blocks:
        heads += block.heads
        blobs |= block.blobs
    return Block(heads, b"".join([b.ids for b in blocks]), b"".join([b.log_probs for b in blocks]), blobs)


def _plan_into_channel(state: State, channel: Channel, moved: list[int], block: Block, now: float) -> Plan:
    submit = plan_submit(channel, block, now, state.holds_blob)
    [appended] = submit.facts
    assert isinstance(appended, facts.Appended)
    assert submit.block is not None
    members: dict[str, list[str]] = {}
    group_numbers: dict[str, int] = {}
    for head, number in zip(submit.block.heads, appended.groups, strict=True):
        group_numbers[head.prompt_uid] = number
        if head.step_index == 0:
            members.setdefault(head.prompt_uid, []).append(head.trajectory_uid)
    opened = [
        facts.Opened(channel.name, now, uids[0], prompt, n_rollouts=len(uids), group=group_numbers[prompt])
        for prompt, uids in members.items()
    ]
    return Plan([GroupsMoved("", now, tuple(moved)), *opened, appended], submit.block, again=True)


# -- from the channel --------------------------------------------------------------------------------------------------


def from_channel(state: State, channel: Channel, batch_size: int, now: float) -> Plan | None:
    """Moves the channel's oldest ready groups here, as many as make a batch possible; None where none do."""
    counts = state.scored.batching.sizes()
    sequences = sum(size * count for size, count in counts.items())
    missing = batch_size - sequences
    if not _may_suffice(channel, missing):
        return None
    moved: list[tuple[GroupState, ScoredGroup]] = []
    for group, as_scored in _as_scored(channel, batch_size, missing):
        if sequences >= ENOUGH_BATCHES * batch_size:
            return None
        moved.append((group, as_scored))
        sequences += as_scored.sequences
        counts[as_scored.sequences] = counts.get(as_scored.sequences, 0) + 1
        if sequences >= batch_size and sums(counts, batch_size) >> batch_size & 1:
            useful = [one for one in moved if _useful(one[1].sequences, counts, batch_size)]
            return _plan_from_channel(state, channel, useful, now) if useful else None
    return None


def _useful(size: int, counts: dict[int, int], batch_size: int) -> bool:
    """Whether some full batch holds a group of this size: others would only become dead letters."""
    rest = {**counts, size: counts[size] - 1}
    return sums(rest, batch_size - size) >> (batch_size - size) & 1 == 1


def _may_suffice(channel: Channel, missing: int) -> bool:
    """Whether the ready groups have so many trajectories: a poll for a batch should not unpack them for nothing."""
    for seq in policies.ready_groups(channel, None):
        missing -= len(channel.groups[seq].trajectories)
        if missing <= 0:
            return True
    return False


def _as_scored(channel: Channel, batch_size: int, missing: int) -> Iterator[tuple[GroupState, ScoredGroup]]:
    """The ready groups that a batch can hold, as environments would post them, oldest first. `MustLoad` where their
    payloads are not in memory: of as many trajectories as are missing at once, then of a batch's worth at a time."""
    for some in _ready_in_portions(channel, missing, batch_size):
        if channel.memory.in_journal:
            check_loaded(member for _, members in some for member in members)
        for group, members in some:
            found = [sequence for member in members for sequence in trajectory_view(channel, member).sequences()]
            if 0 < len(found) <= batch_size:
                yield group, from_sequences(found)


def _ready_in_portions(
    channel: Channel, first: int, others: int
) -> Iterator[list[tuple[GroupState, list[TrajectoryState]]]]:
    """The ready groups, each with the trajectories that a hand-out takes of it, oldest first: at once those of `first`
    trajectories, then of `others` at a time."""
    some: list[tuple[GroupState, list[TrajectoryState]]] = []
    wanted = first
    for seq in policies.ready_groups(channel, None):
        group = channel.groups[seq]
        left_out = set(policies.surplus(channel, group))
        members = [member for uid, member in group.trajectories.items() if uid not in left_out]
        some.append((group, members))
        wanted -= len(members)
        if wanted <= 0:
            yield some
            some, wanted = [], others
    if some:
        yield some


def _plan_from_channel(state: State, channel: Channel, moved: list[tuple[GroupState, ScoredGroup]], now: float) -> Plan:
    numbered = list(enumerate((as_scored for _, as_scored in moved), state.scored.next_number))
    state.scored.pieces.stage([(number, one.piece) for number, one in numbered])
    left_out = [policies.surplus(channel, group) for group, _ in moved]
    entries = tuple(
        PostedGroup(
            *(number, one.piece.size, one.piece.crc, one.sequences),
            channel=channel.name,
            trajectories=tuple(uid for uid in group.trajectories if uid not in surplus),
        )
        for (number, one), (group, _), surplus in zip(numbered, moved, left_out, strict=True)
    )
    taken = facts.HandedOut(
        channel.name, now, tuple(group.seq for group, _ in moved), tuple(uid for uids in left_out for uid in uids)
    )
    block = Block([], b"", b"", {blob_name(number): one.piece.data for number, one in numbered})
    return Plan([taken, GroupsPosted("", now, entries)], block, again=True)
