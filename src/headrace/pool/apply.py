"""What each fact does to a pool's state: the one place where the state changes.

Live calls and recovery go through the same `apply`, so what a journal replays to is what was there. A fact about
something that is not there (a hole that a repair left) is counted and passed over, and what the hole swallowed is set
right; in a journal that was never repaired, the rules for that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.data.block import Block, StepHead
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.groups import DAMAGED, NACK, GroupState, Lease, is_quarantined, reconcile
from headrace.pool.scored.apply import APPLY as _APPLY_TO_SCORED
from headrace.pool.scored.groups import FORGOTTEN
from headrace.pool.snapshot import APPLY as _APPLY_IMAGES
from headrace.pool.state import State


def apply(state: State, facts: Sequence[f.Fact], block: Block | None) -> None:
    """Changes the state by facts that were decided on; `block` holds the steps that go with them."""
    capture = state.capture
    for fact in facts:
        if capture is not None:
            capture.before(fact, block)
        if not fact.channel:
            _APPLY[type(fact)](state, None, fact, block)
            continue
        channel = state.channel(fact.channel)
        channel.now = max(channel.now, fact.at)
        if channel.grace_deadlines:
            channel.end_graces(fact.at)  # no fact of its own, so it must not depend on who asked when
        if channel.replies:
            channel.forget_replies(channel.now)  # the same
        _APPLY[type(fact)](state, channel, fact, block)


def _configured(state: State, channel: Channel, fact: f.Configured, block: Block | None) -> None:
    channel.configure(fact.config, fact.at)
    channel.by_default = False
    state.record("config", channel.name, fact.at, **msgspec.structs.asdict(fact.config))


def _defaulted(state: State, channel: Channel, fact: f.Defaulted, block: Block | None) -> None:
    if fact.config != channel.config:
        channel.configure(fact.config, fact.at)
    channel.by_default = True


def _versioned(state: State, channel: Channel, fact: f.Versioned, block: Block | None) -> None:
    channel.set_version(fact.version)
    if fact.everywhere:
        state.version = fact.version
    state.record("version", channel.name, fact.at, version=fact.version)


def _closed(state: State, channel: Channel, fact: f.Closed, block: Block | None) -> None:
    channel.closed = fact.closed
    channel.changed = True
    if fact.everywhere:
        state.closed = fact.closed
    state.record("close" if fact.closed else "reopen", channel.name, fact.at)


def _opened(state: State, channel: Channel, fact: f.Opened, block: Block | None) -> None:
    number = fact.group if fact.group >= 0 else None
    channel.open(fact.trajectory, fact.prompt, fact.metadata, fact.n_rollouts, fact.at, number)


def _appended(state: State, channel: Channel, fact: f.Appended, block: Block | None) -> None:
    assert block is not None
    numbers: Sequence[int | None] = fact.groups or [None] * len(block.heads)
    known = {number for number in fact.groups if number in channel.groups}
    for (record, ids_at, log_probs_at), number in zip(block.placed_records(), numbers, strict=True):
        head = record.head
        if (head.base >= 0 or head.trajectory_uid in channel.trajectories) and not _fits(channel, head):
            channel.ledger.submitted += 1
            channel.ledger.dropped[DAMAGED] += 1
            state.orphan(fact)
            continue
        if head.blobs:
            state.attach_blobs(record, block)
        if number in known and number not in channel.groups:
            number = None  # an earlier step of this submit was the last that its group waited for
            if fact.behind >= 0 and head.prompt_uid not in channel.open_groups:
                number = max(fact.behind, channel.next_seq)
        channel.append(record, fact.at, number)
        state.memory.keep(record, block.place, ids_at, log_probs_at)
        if head.extra:
            reason = head.peek().quarantined
            if reason is not None:
                state.record(
                    "quarantine",
                    channel.name,
                    fact.at,
                    trajectory=head.trajectory_uid,
                    step=head.step_index,
                    reason=reason,
                )


def _refused(state: State, channel: Channel, fact: f.Refused, block: Block | None) -> None:
    channel.refuse(fact.trajectory, fact.prompt, fact.steps, fact.reason)
    state.record("late_steps", channel.name, fact.at, trajectory=fact.trajectory, steps=fact.steps, reason=fact.reason)


def _amended(state: State, channel: Channel, fact: f.Amended, block: Block | None) -> None:
    trajectory = channel.trajectories.get(fact.trajectory)
    if trajectory is None or fact.index not in trajectory.tree.records:
        return state.orphan(fact)
    channel.amend(trajectory, fact.index, fact.reward, fact.is_last, fact.extra, fact.at)


def _scored(state: State, channel: Channel, fact: f.Scored, block: Block | None) -> None:
    trajectory = channel.trajectories.get(fact.trajectory)
    if trajectory is None:
        return state.orphan(fact)
    there = [given for given in fact.rewards if given[0] in trajectory.tree.records]
    if len(there) < len(fact.rewards):
        state.orphan(fact)
    channel.score(trajectory, there, fact.at)


def _completed(state: State, channel: Channel, fact: f.Completed, block: Block | None) -> None:
    trajectory = channel.trajectories.get(fact.trajectory)
    if trajectory is None:
        return state.orphan(fact)
    channel.end(trajectory, fact.last, fact.at)


def _failed(state: State, channel: Channel, fact: f.Failed, block: Block | None) -> None:
    trajectory = channel.trajectories.get(fact.trajectory)
    if trajectory is None:
        return state.orphan(fact)
    if trajectory.group.lease:
        _set_free(state, channel, trajectory.group, fact)
    detail = {"trajectory": fact.trajectory, "group": trajectory.group.uid, "steps": len(trajectory.tree)}
    state.record("failed", channel.name, fact.at, **detail, reason=fact.reason, quarantined=fact.quarantine)
    channel.fail(trajectory, fact.reason, fact.at, quarantine=fact.quarantine)


def _late_reward(state: State, channel: Channel, fact: f.LateReward, block: Block | None) -> None:
    channel.ledger.counts["late_rewards"] += 1
    state.record("late_reward", channel.name, fact.at, trajectory=fact.trajectory, reward=fact.reward)


def _handed_out(state: State, channel: Channel, fact: f.HandedOut, block: Block | None) -> None:
    lease = Lease(fact.lease, fact.deadline, fact.request)
    lease.groups = [channel.groups[seq] for seq in fact.groups if seq in channel.groups]
    lease.replayed = [channel.history[seq] for seq in fact.replayed if seq in channel.history]
    if len(lease.groups) < len(fact.groups):
        state.orphan(fact)
    for group in lease.groups:
        _set_free(state, channel, group, fact)
    for uid in fact.surplus:
        trajectory = channel.trajectories.get(uid)
        if trajectory is not None and trajectory.group in lease.groups:
            channel.drop_trajectory(trajectory, "surplus")
    if fact.surplus:  # behind a hole nothing else may have been left of a group, which ended with it
        lease.groups = [group for group in lease.groups if channel.groups.get(group.seq) is group]
    if fact.lease:
        channel.count_lease(fact.lease)
    for group in lease.replayed:
        group.deliveries += 1
    channel.hand_out(lease, bool(fact.lease))
    if fact.surplus:
        state.record("surplus", channel.name, fact.at, trajectories=list(fact.surplus))


def _steps_handed_out(state: State, channel: Channel, fact: f.StepsHandedOut, block: Block | None) -> None:
    lease = Lease(fact.lease, fact.deadline, fact.request)
    for uid, index in fact.steps:
        trajectory = channel.trajectories.get(uid)
        if trajectory is not None and index in trajectory.tree.records:
            if trajectory.handed_out(index):
                _set_free(state, channel, trajectory.group, fact)
            if not trajectory.handed_out(index) and not is_quarantined(trajectory.tree.records[index]):
                lease.steps.append((trajectory, index))
    if len(lease.steps) < len(fact.steps):
        state.orphan(fact)
    if fact.lease:
        channel.count_lease(fact.lease)
    channel.hand_out(lease, bool(fact.lease))


def _set_free(state: State, channel: Channel, group: GroupState, fact: f.Fact) -> None:
    if group.lease or group.leased:
        state.orphan(fact)
        _end_leases_of(channel, group)


def _free_groups(state: State, channel: Channel, fact: f.Dropped | f.Trimmed) -> Iterator[GroupState]:
    """The groups of a fact that are there, each out of any lease before it is given."""
    for seq in fact.groups:
        group = channel.groups.get(seq)
        if group is None:
            state.orphan(fact)
            continue
        _set_free(state, channel, group, fact)
        yield group


def _acked(state: State, channel: Channel, fact: f.Acked, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.ack(lease)
    state.scored.settle_fetch(fact.lease, arrived=True)


def _returned(state: State, channel: Channel, fact: f.Returned, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.give_back(lease, nacked=fact.reason == NACK)
    state.scored.settle_fetch(fact.lease, arrived=False)
    state.record("redelivery", channel.name, fact.at, lease=fact.lease, reason=fact.reason)


def _extended(state: State, channel: Channel, fact: f.Extended, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.extend(lease, fact.deadline)


def _dropped(state: State, channel: Channel, fact: f.Dropped, block: Block | None) -> None:
    for group in _free_groups(state, channel, fact):
        state.record("drop", channel.name, fact.at, group=group.uid, steps=group.queued, reason=fact.reason)
        channel.drop(group, fact.reason)


def _trimmed(state: State, channel: Channel, fact: f.Trimmed, block: Block | None) -> None:
    for group in _free_groups(state, channel, fact):
        channel.trim(group)
        state.record("partial", channel.name, fact.at, group=group.uid, trajectories=len(group.counted))


def _forgotten(state: State, channel: Channel, fact: f.Forgotten, block: Block | None) -> None:
    known = channel.trajectories.get(fact.trajectory)
    if known is None or len(known.tree) or known.metadata:
        state.unerased = True
    channel.forget(fact.trajectory)
    for number in state.scored.forget(channel.name, fact.trajectory):
        reason = f"trajectory {fact.trajectory!r} of channel {channel.name!r} was forgotten"
        state.record("dead_letter", "", fact.at, group=number, why=FORGOTTEN, reason=reason)
    state.record("forget", channel.name, fact.at, trajectory=fact.trajectory)


def _clock_moved(state: State, channel: None, fact: f.ClockMoved, block: Block | None) -> None:
    for name in list(state.channels):
        state.channel(name).move_deadlines(fact.by)
    state.scored.move_deadlines(fact.by)
    state.record("clock", "", fact.at, by=fact.by)


def _cut(state: State, channel: None, fact: f.Cut, block: Block | None) -> None:
    state.record("journal_cut", "", fact.at, detail=fact.detail)


def _lost(state: State, channel: None, fact: f.Lost, block: Block | None) -> None:
    state.record("damage", "", fact.at, detail=fact.detail)


def _tallied(state: State, channel: Channel | None, fact: f.Tallied, block: Block | None) -> None:
    told = fact.submitted, fact.consumed, fact.live
    lost, returned = _settle(channel, *told) if channel is not None else state.scored.settle(*told)
    if lost or returned:
        state.record("damage", fact.channel, fact.at, lost=lost, returned=returned)


def _recounted(state: State, channel: Channel, fact: f.Recounted, block: Block | None) -> None:
    lost = _recount(channel, fact.queued, fact.leased)
    state.record("recount", channel.name, fact.at, lost=lost)


# -- where commits were lost -------------------------------------------------------------------------------------------


def _fits(channel: Channel, head: StepHead) -> bool:
    """Whether a step that was taken can stand here: what it builds on is there, and its place is free."""
    trajectory = channel.trajectories.get(head.trajectory_uid)
    if trajectory is None:
        return head.base < 0
    records = trajectory.tree.records
    return head.step_index not in records and (head.base < 0 or head.base in records)


def _end_leases_of(channel: Channel, group: GroupState) -> None:
    """Ends leases whose end was lost: what comes next says that the group is free."""
    for lease in list(channel.leases.values()):
        if group in lease.groups or any(trajectory.group is group for trajectory, _ in lease.steps):
            channel.give_back(lease)


def count_steps(channel: Channel) -> tuple[int, int]:
    """Steps queued and leased, by what is there."""
    groups = channel.groups.values()
    return sum(group.queued for group in groups), sum(group.leased for group in groups)


def _settle(channel: Channel, submitted: int, consumed: int, live: int) -> tuple[int, int]:
    """Sets the ledger by what it said behind a hole, and by what is there. How many steps were lost, and how many at
    least are queued again though they had gone: nothing says any more which."""
    ledger = channel.ledger
    ledger.queued, ledger.leased = count_steps(channel)
    here = ledger.queued + ledger.leased
    gone = ledger.consumed + ledger.quarantined + sum(ledger.dropped.values())
    found = reconcile(submitted, consumed, here=here, gone=gone, known_consumed=ledger.consumed)
    ledger.submitted = found.submitted
    ledger.consumed += found.consumed
    if found.lost:
        ledger.dropped[DAMAGED] += found.lost
    return found.lost, max(0, here - live)


def _recount(channel: Channel, queued: int, leased: int) -> int:
    """Sets the ledger by what is there; how many steps of it were lost."""
    ledger = channel.ledger
    lost = ledger.queued + ledger.leased - queued - leased
    ledger.queued, ledger.leased = queued, leased
    if lost > 0:
        ledger.dropped[DAMAGED] += lost
    else:
        ledger.submitted -= lost  # their arrival was lost, they were not
    return lost


_APPLY: dict[type, Callable[..., None]] = {
    f.Configured: _configured,
    f.Defaulted: _defaulted,
    f.Versioned: _versioned,
    f.Closed: _closed,
    f.Opened: _opened,
    f.Appended: _appended,
    f.Refused: _refused,
    f.Amended: _amended,
    f.Scored: _scored,
    f.Completed: _completed,
    f.Failed: _failed,
    f.LateReward: _late_reward,
    f.HandedOut: _handed_out,
    f.StepsHandedOut: _steps_handed_out,
    f.Acked: _acked,
    f.Returned: _returned,
    f.Extended: _extended,
    f.Dropped: _dropped,
    f.Trimmed: _trimmed,
    f.Forgotten: _forgotten,
    f.ClockMoved: _clock_moved,
    f.Cut: _cut,
    f.Lost: _lost,
    f.Tallied: _tallied,
    f.Recounted: _recounted,
    **_APPLY_IMAGES,
    **_APPLY_TO_SCORED,
}
