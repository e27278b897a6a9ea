"""The pool's whole state, and the one function that changes it: `apply`.

Live calls and recovery go through the same `apply`, so what a journal replays to is what was there. A fact about
something that is not there (a hole that a repair left) is counted and passed over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from headrace.data.block import Blob, Block, Record, pack_extra
from headrace.pool import facts as f
from headrace.pool import holes
from headrace.pool.channel import Channel
from headrace.pool.config import ChannelConfig, Limits
from headrace.pool.entities import GroupState, Lease, Tomb, TrajectoryState, is_quarantined
from headrace.pool.policies.expiry import end_graces
from headrace.pool.restore import restore_group, restore_lease, restore_step
from headrace.pool.scored.apply import APPLY as _APPLY_TO_DESK
from headrace.pool.scored.groups import ScoredGroups


class Event(msgspec.Struct, frozen=True):
    """A fact as `events()` shows it: `cursor` counts them, over restarts too."""

    cursor: int
    kind: str
    channel: str
    at: float
    detail: dict[str, Any]


class State:
    def __init__(self, defaults: ChannelConfig, limits: Limits) -> None:
        self.defaults = defaults
        self.limits = limits
        self.channels: dict[str, Channel] = {}
        self.scored = ScoredGroups(int(limits.desk_memory_mb * 1e6))
        self.blobs: WeakValueDictionary[bytes, Blob] = WeakValueDictionary()
        self.events: deque[Event] = deque(maxlen=limits.events_kept)
        self.next_cursor = 0
        # What was said of all channels holds for those that come later.
        self.version = 0
        self.closed = False
        self.orphans: Counter[str] = Counter()
        self.unerased = False  # something that was forgotten still stands in the journal

    def channel(self, name: str) -> Channel:
        found = self.channels.get(name)
        if found is None:
            found = self.channels[name] = self._new(name)
            found.changed = True  # those who wait for it looked at one that was not there yet
        return found

    def look(self, name: str) -> Channel:
        """The channel as it is or would be; nothing is created."""
        return self.channels.get(name) or self._new(name)

    def _new(self, name: str) -> Channel:
        channel = Channel(name, self.defaults)
        channel.version, channel.closed = self.version, self.closed
        return channel

    def holds_blob(self, digest: bytes) -> bool:
        """Whether a live step refers to the blob, so that a recovery finds it without another copy."""
        blob = self.blobs.get(digest)
        return blob is not None and blob.uses > 0

    def apply(self, facts: Sequence[f.Fact], block: Block | None) -> None:
        for fact in facts:
            if not fact.channel:
                _APPLY[type(fact)](self, None, fact, block)
                continue
            channel = self.channel(fact.channel)
            channel.now = max(channel.now, fact.at)
            if channel.grace_deadlines:
                end_graces(channel, fact.at)  # no fact of its own, so it must not depend on who asked when
            _APPLY[type(fact)](self, channel, fact, block)

    @property
    def timed(self) -> bool:
        """Whether anything here waits for a time."""
        channels = any(channel.groups or channel.leases or channel.owed for channel in self.channels.values())
        return channels or bool(self.scored.leases or self.scored.heard or self.scored.silent)

    def tallies(self, names: Iterable[str]) -> list[tuple[str, int, int, int]]:
        """What the ledgers of those of the channels that are there say: submitted, consumed, and queued or leased. An
        empty name is the desk's: groups posted, served, and there."""
        found: list[tuple[str, int, int, int]] = []
        for name in names:
            if not name:
                found.append((name, *self.scored.tally()))
                continue
            channel = self.channels.get(name)
            if channel is not None:
                ledger = channel.ledger
                found.append((name, ledger.submitted, ledger.consumed, ledger.queued + ledger.leased))
        return found

    def begun_by(self, facts: Sequence[f.Fact]) -> list[f.Fact]:
        """What must be written before facts about channels that are yet to come: the options these begin with."""
        names = dict.fromkeys(fact.channel for fact in facts if fact.channel and fact.channel not in self.channels)
        return [f.Defaulted(name, facts[0].at, self.defaults) for name in names]

    def sweep(self) -> None:
        for channel in self.channels.values():
            channel.sweep()

    def let_go(self) -> None:
        """Frees what it holds; the state is of no use after this."""
        for channel in self.channels.values():
            channel.let_go()
        self.channels.clear()
        self.scored.let_go()

    def record(self, kind: str, channel: str, at: float, **detail: Any) -> None:
        self.events.append(Event(self.next_cursor, kind, channel, at, detail))
        self.next_cursor += 1

    def adopt(self, record: Record, given: dict[bytes, Any]) -> None:
        """Gives a record its blobs: those that came with it, or the ones that are here already."""
        found = []
        for digest in record.head.blobs:
            blob = self.blobs.get(digest)
            if blob is None and digest in given:
                blob = self.blobs[digest] = Blob(digest, bytes(given[digest]))
            if blob is None:
                extra = record.head.unpack_extra()
                extra.quarantined = "a blob that it needs is lost"
                record.head.extra = pack_extra(extra)
            else:
                found.append(blob)
        record.blobs = tuple(found)

    def orphan(self, fact: f.Fact) -> None:
        self.orphans[type(fact).__name__] += 1


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
    seat = fact.group if fact.group >= 0 else None
    channel.open(fact.trajectory, fact.prompt, fact.metadata, fact.n_rollouts, fact.at, seat)


def _appended(state: State, channel: Channel, fact: f.Appended, block: Block | None) -> None:
    assert block is not None
    seats: Sequence[int | None] = fact.groups or [None] * len(block.heads)
    known = {seat for seat in fact.groups if seat in channel.groups}
    for record, seat in zip(block.records(), seats, strict=True):
        head = record.head
        if (head.base >= 0 or head.trajectory_uid in channel.trajectories) and not holes.fits(channel, head):
            holes.lose(channel, 1)
            state.orphan(fact)
            continue
        if head.blobs:
            state.adopt(record, block.blobs)
        if seat in known and seat not in channel.groups:
            seat = None  # an earlier step of this submit was the last that its group waited for
        channel.append(record, fact.at, seat)
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


def _completed(state: State, channel: Channel, fact: f.Completed, block: Block | None) -> None:
    trajectory = channel.trajectories.get(fact.trajectory)
    if trajectory is None:
        return state.orphan(fact)
    channel.end(trajectory, fact.last, fact.at)


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
        holes.end_leases_of(channel, group)


def _acked(state: State, channel: Channel, fact: f.Acked, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.ack(lease)


def _returned(state: State, channel: Channel, fact: f.Returned, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.give_back(lease)
    state.record("redelivery", channel.name, fact.at, lease=fact.lease, reason=fact.reason)


def _extended(state: State, channel: Channel, fact: f.Extended, block: Block | None) -> None:
    lease = channel.leases.get(fact.lease)
    if lease is None:
        return state.orphan(fact)
    channel.extend(lease, fact.deadline)


def _dropped(state: State, channel: Channel, fact: f.Dropped, block: Block | None) -> None:
    for seq in fact.groups:
        group = channel.groups.get(seq)
        if group is None:
            state.orphan(fact)
            continue
        _set_free(state, channel, group, fact)
        state.record("drop", channel.name, fact.at, group=group.uid, steps=group.queued, reason=fact.reason)
        channel.drop(group, fact.reason)


def _trimmed(state: State, channel: Channel, fact: f.Trimmed, block: Block | None) -> None:
    for seq in fact.groups:
        group = channel.groups.get(seq)
        if group is None:
            state.orphan(fact)
            continue
        _set_free(state, channel, group, fact)
        channel.trim(group)
        state.record("partial", channel.name, fact.at, group=group.uid, trajectories=len(group.ripe))


def _forgotten(state: State, channel: Channel, fact: f.Forgotten, block: Block | None) -> None:
    known = channel.trajectories.get(fact.trajectory)
    if known is None or len(known.tree) or known.metadata:
        state.unerased = True
    channel.forget(fact.trajectory)
    state.record("forget", channel.name, fact.at, trajectory=fact.trajectory)


def _clock_moved(state: State, channel: None, fact: f.ClockMoved, block: Block | None) -> None:
    for each in state.channels.values():
        each.move_deadlines(fact.by)
    state.scored.move_deadlines(fact.by)
    state.record("clock", "", fact.at, by=fact.by)


def _cut(state: State, channel: None, fact: f.Cut, block: Block | None) -> None:
    state.record("journal_cut", "", fact.at, detail=fact.detail)


def _lost(state: State, channel: None, fact: f.Lost, block: Block | None) -> None:
    state.record("damage", "", fact.at, detail=fact.detail)


def _tallied(state: State, channel: Channel | None, fact: f.Tallied, block: Block | None) -> None:
    told = fact.submitted, fact.consumed, fact.live
    lost, returned = holes.settle(channel, *told) if channel is not None else state.scored.settle(*told)
    if lost or returned:
        state.record("damage", fact.channel, fact.at, lost=lost, returned=returned)


def _recounted(state: State, channel: Channel, fact: f.Recounted, block: Block | None) -> None:
    lost = holes.recount(channel, fact.queued, fact.leased)
    state.record("recount", channel.name, fact.at, lost=lost)


def _channel_image(state: State, channel: Channel, fact: f.ChannelImage, block: Block | None) -> None:
    channel.config = fact.config
    channel.version = fact.version
    channel.closed = fact.closed
    channel.next_seq = fact.next_seq
    channel.next_lease = fact.next_lease
    ledger = channel.ledger
    for name in ("submitted", "queued", "leased", "consumed", "quarantined"):
        setattr(ledger, name, fact.ledger[name])
    ledger.dropped = Counter(fact.ledger["dropped"])
    ledger.counts = Counter(fact.ledger["counts"])
    state.next_cursor = max(state.next_cursor, fact.ledger["cursor"])
    channel.by_default = fact.by_default
    for uid, reason, prompt, digests in fact.tombs:
        channel.tombs[uid] = Tomb(reason, prompt, digests)
    state.version, state.closed = fact.pool_version, fact.pool_closed
    since = fact.owed_since or [fact.at] * len(fact.owed)
    for (prompt, missing), at in zip(fact.owed, since, strict=True):
        channel.owed.owe(prompt, missing, at)
    channel.acked = OrderedDict.fromkeys(fact.acked)


def _group_image(state: State, channel: Channel, fact: f.GroupImage, block: Block | None) -> None:
    assert block is not None
    group = GroupState(fact.prompt, fact.seq, fact.touched)
    group.deliveries, group.partial, group.consumed = fact.deliveries, fact.partial, fact.consumed
    group.broken = fact.broken
    for image in fact.trajectories:
        trajectory = TrajectoryState(image.uid, group)
        trajectory.last, trajectory.completed_at = image.last, image.completed_at
        trajectory.n_rollouts, trajectory.metadata = image.n_rollouts, image.metadata
        trajectory.consumed = set(image.consumed) or None
        trajectory.deliveries = dict(image.deliveries) or None
        group.trajectories[image.uid] = trajectory
    group.seen, group.n, group.oldest = fact.seen, fact.n, fact.oldest
    records = block.records()
    for record in records:
        if record.head.blobs:
            state.adopt(record, block.blobs)
        restore_step(channel, group.trajectories[record.head.trajectory_uid], record)
    restore_group(channel, group, fact.ripe, opened=fact.open)


def _leases_image(state: State, channel: Channel, fact: f.LeasesImage, block: Block | None) -> None:
    gone = {uid: trajectory for group in channel.kept.values() for uid, trajectory in group.trajectories.items()}
    trajectories = {**gone, **channel.trajectories}
    leases = []
    for id, deadline, request, groups, steps, replayed in fact.leases:
        lease = Lease(id, deadline, request)
        lease.groups = [channel.groups[seq] for seq in groups if seq in channel.groups]
        lease.groups += [channel.kept[seq] for seq in groups if seq in channel.kept]
        lease.steps = [(trajectories[uid], index) for uid, index in steps if uid in trajectories]
        lease.replayed = [channel.kept[seq] for seq in replayed if seq in channel.kept]
        restore_lease(channel, lease)
        leases.append(lease)
    for place in fact.replies:
        channel.replies[leases[place].request] = leases[place]
    for seq in fact.history:
        if seq in channel.kept:
            channel.history[seq] = channel.kept[seq]
    channel.kept.clear()


_APPLY: dict[type, Callable[..., None]] = {
    f.Configured: _configured,
    f.Defaulted: _defaulted,
    f.Versioned: _versioned,
    f.Closed: _closed,
    f.Opened: _opened,
    f.Appended: _appended,
    f.Refused: _refused,
    f.Amended: _amended,
    f.Completed: _completed,
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
    f.ChannelImage: _channel_image,
    f.GroupImage: _group_image,
    f.LeasesImage: _leases_image,
    **_APPLY_TO_DESK,
}
