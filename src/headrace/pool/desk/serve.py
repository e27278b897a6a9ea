"""Any producer, any consumer: the desk and one channel serve from each other's groups, where either has too few.

A group that moves leaves the one place and enters the other in one record: whatever happens, it is in exactly one. It
moves only where the move makes up what was asked for, and only if it can be told in the other's terms.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.data.block import Block, StepHead
from headrace.data.errors import InvalidInput
from headrace.data.frame import Buffer
from headrace.data.packing import pack
from headrace.data.scored import Scored, from_sequences, to_steps
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.desk import facts as df
from headrace.pool.desk.batching.subset import sums
from headrace.pool.groups import GroupState
from headrace.pool.intake import plan_submit
from headrace.pool.operation import Plan
from headrace.pool.policies import order
from headrace.pool.queries import trajectory_view
from headrace.pool.state import State

#: Batches' worth of sequences at the desk beyond which no more are brought: by then the batch is filled by age.
ENOUGH = 2


# -- from the desk into the channel ------------------------------------------------------------------------------------


def into_channel(state: State, there: Channel, wanted: int, unit: str, now: float) -> Plan | None:
    """Moves the desk's oldest groups into the channel, so many of them or of their sequences (of which each is a step
    or more), after which to plan again; None where it cannot."""
    desk = state.desk
    queued = len(desk.batching) if unit == "group" else sum(size * n for size, n in desk.batching.sizes().items())
    if there.closed or queued < wanted or len(there.groups) + wanted > there.config.max_queue_size:
        return None
    if there.grace_deadlines:
        return None  # what was brought before is on its way
    moved: list[int] = []
    blocks: list[Block] = []
    for number in desk.batching.oldest_first():
        block = _as_steps(state, there, number)
        if block is None:
            continue
        moved.append(number)
        blocks.append(block)
        wanted -= 1 if unit == "group" else desk.batching.size(number)
        if wanted <= 0:
            return _entered(state, there, moved, _joined(blocks), now)
    return None


def _as_steps(state: State, there: Channel, number: int) -> Block | None:
    """A group of the desk's as steps; None for one that only `desk_batch` can serve."""
    desk, prompt = state.desk, f"desk/{number}"
    if number in desk.unfit:
        return None
    try:
        block = pack(to_steps(desk.shelf.piece(number), prompt))
    except InvalidInput:
        block = None
    if block is None or prompt in there.open_groups or any(_known(there, head.trajectory_uid) for head in block.heads):
        desk.unfit.add(number)
        return None
    return block


def _known(there: Channel, uid: str) -> bool:
    return uid in there.trajectories or uid in there.tombs


def _joined(blocks: list[Block]) -> Block:
    heads: list[StepHead] = []
    blobs: dict[bytes, Buffer] = {}
    for block in blocks:
        heads += block.heads
        blobs |= block.blobs
    return Block(heads, b"".join([b.ids for b in blocks]), b"".join([b.log_probs for b in blocks]), blobs)


def _entered(state: State, there: Channel, moved: list[int], block: Block, now: float) -> Plan:
    taken = plan_submit(there, block, now, state.holds_blob)
    facts: list[f.Fact] = [df.Moved("", now, tuple(moved))]
    [appended] = taken.facts
    assert isinstance(appended, f.Appended)
    assert taken.block is not None
    members: dict[str, list[str]] = {}
    seats: dict[str, int] = {}
    for head, seat in zip(taken.block.heads, appended.groups, strict=True):
        seats[head.prompt_uid] = seat
        if head.step_index == 0:
            members.setdefault(head.prompt_uid, []).append(head.trajectory_uid)
    for prompt, uids in members.items():
        facts.append(f.Opened(there.name, now, uids[0], prompt, n_rollouts=len(uids), group=seats[prompt]))
    return Plan([*facts, appended], taken.block, again=True)


# -- from the channel to the desk --------------------------------------------------------------------------------------


def to_desk(state: State, there: Channel, batch_size: int, now: float) -> Plan | None:
    """Moves the channel's oldest ready groups to the desk, as many as make a batch possible; None where none do."""
    desk = state.desk
    counts = desk.batching.sizes()
    sequences = sum(size * count for size, count in counts.items())
    if not _may_suffice(there, batch_size - sequences):
        return None
    moved: list[tuple[GroupState, Scored]] = []
    for group, scored in _scored(there, batch_size):
        if sequences >= ENOUGH * batch_size:
            return None
        moved.append((group, scored))
        sequences += scored.sequences
        counts[scored.sequences] = counts.get(scored.sequences, 0) + 1
        if sequences >= batch_size and sums(counts, batch_size) >> batch_size & 1:
            useful = [one for one in moved if _useful(one[1].sequences, counts, batch_size)]
            return _brought(state, there, useful, now) if useful else None
    return None


def _useful(size: int, counts: dict[int, int], batch_size: int) -> bool:
    """Whether some full batch holds a group of this size: others would only go to waste at the desk."""
    rest = {**counts, size: counts[size] - 1}
    return sums(rest, batch_size - size) >> (batch_size - size) & 1 == 1


def _may_suffice(there: Channel, missing: int) -> bool:
    """Whether the ready groups have so many trajectories: whoever polls for a batch should not unpack them in vain."""
    for seq in order.ready_groups(there, None):
        missing -= len(there.groups[seq].trajectories)
        if missing <= 0:
            return True
    return False


def _scored(there: Channel, batch_size: int) -> Iterator[tuple[GroupState, Scored]]:
    """The ready groups that a batch can hold, as environments would post them, oldest first."""
    for seq in order.ready_groups(there, None):
        group = there.groups[seq]
        left_out = set(order.surplus(there, group))
        members = [member for uid, member in group.trajectories.items() if uid not in left_out]
        found = [sequence for member in members for sequence in trajectory_view(there, member).sequences()]
        if 0 < len(found) <= batch_size:
            yield group, from_sequences(found)


def _brought(state: State, there: Channel, moved: list[tuple[GroupState, Scored]], now: float) -> Plan:
    first = state.desk.next_number
    state.desk.shelf.stage([(first + at, scored.piece) for at, (_, scored) in enumerate(moved)])
    entries = [
        df.Entry(first + at, scored.piece.size, scored.piece.crc, scored.sequences)
        for at, (_, scored) in enumerate(moved)
    ]
    surplus = tuple(uid for group, _ in moved for uid in order.surplus(there, group))
    taken = f.HandedOut(there.name, now, tuple(group.seq for group, _ in moved), surplus)
    block = Block([], b"", b"", {df.blob_name(first + at): scored.piece.data for at, (_, scored) in enumerate(moved)})
    return Plan([taken, df.Posted("", now, tuple(entries))], block, again=True)
