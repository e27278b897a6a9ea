"""A snapshot of a pool's state as it was at one moment, taken in slices while the pool goes on.

A `Capture` walks through channels and groups a little at a time, between calls. What a call is about to change and was
not captured yet is captured first, as it still is: `apply` says what comes (`before`), and so the order of slices and
calls does not matter. What can change (heads, counters) is encoded at once; what cannot (token bytes, tombstones) is
only referred to, and the rest of the work, encoding, summing and writing, happens while nobody waits.

Few facts change every group of a channel. They spoil a capture: it must be begun anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from headrace.data.block import Blob, Block, BlockHeader, Record, ids_bytes, log_probs_bytes
from headrace.data.frame import Buffer
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.channel_index import ChannelIndex
from headrace.pool.groups import GroupState, Lease, Tombstone
from headrace.pool.journal.payloads import ArraysInFile, BodyPlace, BytesInFile
from headrace.pool.journal.records import Captured, Commit, MovableBody, encode
from headrace.pool.scored import snapshot as scored_snapshot
from headrace.pool.scored.snapshot import Image
from headrace.pool.state import State

#: A channel may remember 200,000 trajectories: as many in one record would be a frame of tens of MB.
TOMBSTONES_A_RECORD = 10_000
#: What a snapshot takes for a group, for a trajectory and for a step, about, beside names, metadata and arrays.
GROUP_BYTES, TRAJECTORY_BYTES, STEP_BYTES = 200, 50, 64
#: Numbers of groups that are gone which a slice passes over before it looks at the time.
PASSED_OVER_AT_ONCE = 256


def capture(state: State, now: float) -> list[Captured]:
    """The records of a snapshot of a state that is held still meanwhile."""
    whole = Capture(state, now)
    whole.take(lambda: True)
    return list(whole.records())


def live_bytes(state: State) -> int:
    """Bytes of groups with all that is in them, of blobs and of scored groups that a snapshot would hold, about: calls
    may go on meanwhile. What else it holds (tombstones, why trajectories failed, keys) stays while these come and
    go."""
    total = sum(blob.size for ref in state.blobs.valuerefs() if (blob := ref()) is not None)
    total += state.scored.pieces.memory + state.scored.pieces.spilled
    for channel in list(state.channels.values()):
        groups = {id(group): group for group in (*channel.groups.values(), *_handed_out(channel))}
        for group in groups.values():
            total += GROUP_BYTES + len(group.uid)
            for trajectory in list(group.trajectories.values()):
                total += TRAJECTORY_BYTES + len(trajectory.uid) + len(trajectory.metadata)
                a_step = STEP_BYTES + len(trajectory.uid) + len(group.uid)
                records = list(trajectory.tree.records.values())
                total += sum(record.array_bytes + a_step + len(record.head.extra) for record in records)
    return total


class Capture:
    """`begin` it with the state held still; then `take` slices, each with the state held still, until the last; then
    `records` has everything. It is `spoiled` where it must be begun anew, and of no use then."""

    def __init__(self, state: State, now: float) -> None:
        self._state = state
        self._now = now
        self._about_pool = state.version, state.closed, state.next_cursor
        self._channels: dict[str, _ChannelCapture] = {}  # those that are begun
        self._ahead = deque(state.channels.values())
        self._begun_channels = len(self._ahead)  # those that are begun later are no part of it
        self._scored: Callable[[], Iterator[Image]] | None = None
        self.spoiled = False

    @classmethod
    def begin(cls, state: State, now: float) -> Capture:
        """A capture of the state as it is, which hears of every change to come until `end`."""
        capture = state.capture = cls(state, now)
        for channel in state.channels.values():
            channel.before_change = capture.before_group
        return capture

    def end(self) -> None:
        """Hears of changes no longer."""
        self._state.capture = None
        for channel in self._state.channels.values():
            channel.before_change = None

    def take(self, more: Callable[[], bool]) -> bool:
        """One slice: goes on for as long as there is `more` time, and at least a little. Whether all is done."""
        while not self.spoiled:
            if self._scored is None:
                self._begin_scored()
            elif not self._ahead:
                return True
            elif self._of(self._ahead[0]).take():
                self._ahead.popleft()
            if not more():
                return not self._ahead and self._scored is not None
        return False

    def records(self) -> Iterator[Captured]:
        """The snapshot's records, once it is done. Nothing needs to be held still."""
        for channel in self._channels.values():
            yield from channel.records()
        for fact, header, body in self._scored() if self._scored is not None else ():
            yield Captured(encode(Commit([fact], header)), body)

    # -- what a call is about to change --------------------------------------------------------------------------------

    def before(self, fact: f.Fact, block: Block | None) -> None:
        """A fact is about to be applied: captures what it changes, as it still is."""
        if self._scored is None:
            self._begin_scored()
        if isinstance(fact, f.ClockMoved):
            self.spoiled = True
        channel = self._state.channels.get(fact.channel)
        if channel is None or self.spoiled or channel.number >= self._begun_channels:
            return
        if isinstance(fact, f.Configured | f.Defaulted) and fact.config != channel.config:
            self.spoiled = True
            return
        captured = self._of(channel)
        for group in _changed_groups(channel, fact, block):
            captured.save(group)

    def before_group(self, channel: ChannelIndex, group: GroupState) -> None:
        """The same for a group that changes without a fact: a grace is over, or nobody can ask for it any more."""
        if not self.spoiled:
            self._of(self._state.channels[channel.name]).save(group)

    def _begin_scored(self) -> None:
        scored = self._state.scored
        self._scored = scored_snapshot.freeze(scored, self._about_pool[2], self._now)

    def _of(self, channel: Channel) -> _ChannelCapture:
        found = self._channels.get(channel.name)
        if found is None:
            found = _ChannelCapture(channel, self._now, self._about_pool)
            self._channels[channel.name] = found
        return found


class _ChannelCapture:
    """One channel: what is small is captured when it is begun, groups one by one."""

    def __init__(self, channel: Channel, now: float, about_pool: tuple[int, bool, int]) -> None:
        self._channel = channel
        self._now = now
        self._written_blobs: set[bytes] = set()
        self._tombstones = channel.tombstones.freeze()
        self._failed = dict(channel.failed)
        self._image = _channel_image(channel, now, about_pool)
        self._end = _leases_image(channel, now)
        self._groups: list[Captured] = []
        # Groups that are kept for replay and for lost answers, and then those that live: by number, up to the newest.
        self._kept = {group.seq: group for group in _handed_out(channel) if group.seq not in channel.groups}
        self._next = channel.first_seq
        self._after = channel.next_seq
        self._saved: set[int] = set()  # living groups that were captured ahead of their turn
        self._oldest: int | None = None

    def take(self) -> bool:
        """Captures the next group; whether there is none left."""
        if self._kept:
            self.save(next(iter(self._kept.values())))
            return False
        channel, groups = self._channel, self._channel.groups
        for seq in range(self._next, min(self._next + PASSED_OVER_AT_ONCE, self._after)):
            self._next = seq + 1
            group = groups.get(seq)
            if group is None:
                continue
            if self._oldest is None:
                self._oldest = seq
            if seq not in self._saved:
                self._capture(group)
                return False
        if self._next < self._after:
            return False
        channel.first_seq = self._after if self._oldest is None else self._oldest
        self._saved.clear()
        return True

    def save(self, group: GroupState) -> None:
        """Captures a group that is about to change, unless that was done."""
        seq = group.seq
        if self._kept.get(seq) is group:
            del self._kept[seq]
            self._capture(group)
        elif self._next <= seq < self._after and seq not in self._saved and self._channel.groups.get(seq) is group:
            self._saved.add(seq)
            self._capture(group)

    def records(self) -> Iterator[Captured]:
        """Its records: options and counters with the tombstones, groups, and leases at the end."""
        tombs = iter([(uid, tomb) for page in self._tombstones for uid, tomb in page.items()])
        first = True
        while (some := list(islice(tombs, TOMBSTONES_A_RECORD))) or first:
            yield Captured(encode(Commit([self._with_tombstones(some)])), [])
            first = False
        yield from self._groups
        yield Captured(encode(Commit([self._end])), [])

    def _with_tombstones(self, some: list[tuple[str, Tombstone]]) -> f.ChannelImage:
        return msgspec.structs.replace(
            self._image,
            tombstones=tuple((uid, tomb.reason, tomb.prompt, tomb.digests) for uid, tomb in some),
            failed=tuple((uid, *msgspec.structs.astuple(self._failed[uid])) for uid, _ in some if uid in self._failed),
        )

    def _capture(self, group: GroupState) -> None:
        self._groups.append(_group(self._channel, group, self._now, self._written_blobs))


def _channel_image(channel: Channel, now: float, about_pool: tuple[int, bool, int]) -> f.ChannelImage:
    version, closed, cursor = about_pool
    return f.ChannelImage(
        channel.name,
        now,
        channel.config,
        channel.version,
        channel.closed,
        channel.next_seq,
        channel.next_lease,
        {**channel.ledger.as_dict(), "counts": dict(channel.ledger.counts), "cursor": cursor},
        (),
        tuple((prompt, missing) for prompt, missing, _ in channel.expected_late),
        tuple(channel.acked),
        version,
        closed,
        channel.by_default,
        tuple(since for _, _, since in channel.expected_late),
        nacked=tuple(channel.nacked),
    )


def _leases_image(channel: Channel, now: float) -> f.LeasesImage:
    leases = {id(lease): lease for lease in (*channel.leases.values(), *channel.replies.values())}
    places = {key: place for place, key in enumerate(leases)}
    replies = tuple(places[id(reply)] for reply in channel.replies.values())
    at = tuple(reply.at for reply in channel.replies.values())
    return f.LeasesImage(channel.name, now, tuple(map(_lease, leases.values())), tuple(channel.history), replies, at)


def _lease(lease: Lease) -> tuple[str, float, str, tuple[int, ...], tuple[tuple[str, int], ...], tuple[int, ...]]:
    return (
        lease.id,
        lease.deadline,
        lease.request,
        tuple(group.seq for group in lease.groups),
        tuple((trajectory.uid, index) for trajectory, index in lease.steps),
        tuple(group.seq for group in lease.replayed),
    )


def _handed_out(channel: Channel) -> Iterator[GroupState]:
    """The groups whose content is held for replay, for a lost answer, or under a lease."""
    yield from tuple(channel.history.values())
    for lease in (*channel.replies.values(), *channel.leases.values()):
        yield from (*lease.groups, *lease.replayed, *(trajectory.group for trajectory, _ in lease.steps))


def _group(channel: Channel, group: GroupState, now: float, written_blobs: set[bytes]) -> Captured:
    images, records = [], list[Record]()
    for trajectory in group.trajectories.values():
        records.extend(trajectory.tree.in_order())
        images.append(
            f.TrajectoryImage(
                trajectory.uid,
                trajectory.last,
                trajectory.completed_at,
                trajectory.n_rollouts,
                trajectory.metadata,
                tuple(sorted(trajectory.consumed or ())),
                tuple((trajectory.deliveries or {}).items()),
            )
        )
    blobs = {blob.digest: blob for record in records for blob in record.blobs if blob.digest not in written_blobs}
    written_blobs.update(blobs)
    image = f.GroupImage(
        channel.name,
        now,
        group.uid,
        group.seq,
        group.touched,
        group.deliveries,
        group.partial,
        group.seq not in channel.groups,
        group.broken,
        group.seen,
        group.counted,
        tuple(images),
        group.n,
        group.oldest,
        channel.open_groups.get(group.uid) is group,
    )
    payloads = _Payloads(tuple(records), tuple(blobs.values()))
    return Captured(encode(Commit([image], payloads.header())), payloads)


class _Payloads(MovableBody, gc=False, eq=False):
    """The arrays and blobs of a group: read when the snapshot is written, and read from there once it is in place."""

    records: tuple[Record, ...]
    blobs: tuple[Blob, ...]

    def header(self) -> BlockHeader:
        """How the body is laid out. Heads may change afterwards: it must be encoded at once."""
        heads = [record.head for record in self.records]
        sizes = [(blob.digest, blob.size) for blob in self.blobs]
        return BlockHeader(heads, sum(map(ids_bytes, heads)), sum(map(log_probs_bytes, heads)), sizes)

    def __call__(self) -> list[Buffer]:
        """The body. Raises `JournalDamaged` where a payload does not read back."""
        arrays = [record.arrays() for record in self.records]
        log_probs = [each for _, each in arrays if each]
        return [*(ids for ids, _ in arrays), *log_probs, *(blob.data for blob in self.blobs)]

    def moved(self, place: BodyPlace) -> None:
        """The body lies there now. Readers that took the old place before this still find it."""
        at = 0
        log_probs_at = sum(ids_bytes(record.head) for record in self.records)
        for record in self.records:
            if isinstance(record.stored, ArraysInFile):
                record.stored = place.moved(at, log_probs_at, record.stored)
            at += ids_bytes(record.head)
            log_probs_at += log_probs_bytes(record.head)
        at = log_probs_at
        for blob in self.blobs:
            if isinstance(blob.stored, BytesInFile):
                blob.stored = place.moved_blob(at, blob.stored)
            at += blob.size


# -- what facts change -------------------------------------------------------------------------------------------------


def _changed_groups(channel: Channel, fact: f.Fact, block: Block | None) -> Iterable[GroupState]:
    """The groups of a channel that a fact may change, end or hand out. New ones are none of them."""
    changed = _CHANGED.get(type(fact))
    if changed is None:
        return []
    found = [group for group in changed(channel, fact, block) if group is not None]
    if isinstance(fact, _FREEING) and any(group.lease or group.leased for group in found):
        # Where a journal was repaired, what a fact is about may be under leases whose end was lost: they end with it.
        found += [group for lease in channel.leases.values() for group in _of_lease(lease)]
    return found


def _of_lease(lease: Lease) -> list[GroupState]:
    return [*lease.groups, *lease.replayed, *(trajectory.group for trajectory, _ in lease.steps)]


def _of_trajectory(channel: Channel, uid: str) -> GroupState | None:
    trajectory = channel.trajectories.get(uid)
    return trajectory.group if trajectory is not None else None


def _by_trajectory(channel: Channel, fact: f.Amended, block: Block | None) -> list[GroupState | None]:
    return [_of_trajectory(channel, fact.trajectory)]


def _by_numbers(channel: Channel, fact: f.Dropped, block: Block | None) -> list[GroupState | None]:
    return [channel.groups.get(seq) for seq in fact.groups]


def _opened(channel: Channel, fact: f.Opened, block: Block | None) -> list[GroupState | None]:
    into = channel.open_groups.get(fact.prompt), channel.groups.get(fact.group)
    return [_of_trajectory(channel, fact.trajectory), *into]


def _appended(channel: Channel, fact: f.Appended, block: Block | None) -> list[GroupState | None]:
    heads = block.heads if block is not None else []
    found = {head.trajectory_uid: _of_trajectory(channel, head.trajectory_uid) for head in heads}
    by_prompt = {head.prompt_uid: channel.open_groups.get(head.prompt_uid) for head in heads}
    return [*found.values(), *by_prompt.values(), *(channel.groups.get(seq) for seq in set(fact.groups))]


def _handed_out_now(channel: Channel, fact: f.HandedOut, block: Block | None) -> list[GroupState | None]:
    return [*(channel.groups.get(seq) for seq in fact.groups), *(channel.history.get(seq) for seq in fact.replayed)]


def _steps_handed_out(channel: Channel, fact: f.StepsHandedOut, block: Block | None) -> list[GroupState | None]:
    return [_of_trajectory(channel, uid) for uid in {uid for uid, _ in fact.steps}]


def _by_lease(channel: Channel, fact: f.Acked, block: Block | None) -> list[GroupState | None]:
    lease = channel.leases.get(fact.lease)
    return [*_of_lease(lease)] if lease is not None else []


def _forgotten(channel: Channel, fact: f.Forgotten, block: Block | None) -> list[GroupState | None]:
    uid = fact.trajectory
    return [_of_trajectory(channel, uid), *(group for group in _handed_out(channel) if uid in group.trajectories)]


#: Facts that end the leases of what they are about.
_FREEING = f.Failed | f.HandedOut | f.StepsHandedOut | f.Dropped | f.Trimmed

_CHANGED: Mapping[type, Callable[..., list[GroupState | None]]] = {
    f.Opened: _opened,
    f.Appended: _appended,
    f.Amended: _by_trajectory,
    f.Scored: _by_trajectory,
    f.Completed: _by_trajectory,
    f.Failed: _by_trajectory,
    f.HandedOut: _handed_out_now,
    f.StepsHandedOut: _steps_handed_out,
    f.Acked: _by_lease,
    f.Returned: _by_lease,
    f.Dropped: _by_numbers,
    f.Trimmed: _by_numbers,
    f.Forgotten: _forgotten,
}
