"""Snapshots: a state as facts that rebuild it, and the file that they are written to.

`capture` is called with the state held still. It encodes what can change (heads, counters) and only refers to what
cannot (token bytes), so the long part, summing and writing, happens while the pool goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from headrace.data.block import BlockHeader, Record
from headrace.data.frame import Buffer, FrameKind
from headrace.data.frame import encode as encode_frame
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.groups import GroupState, Lease
from headrace.pool.journal.files import Files, snapshot_path
from headrace.pool.journal.records import Commit, SegmentHead, encode, encode_head, encode_snapshot_end
from headrace.pool.scored import image
from headrace.pool.state import State

#: A record: its header, and its body, or how to read that when it is written.
Captured = tuple[bytes, list[Buffer] | Callable[[], list[Buffer]]]

#: A channel may remember 200,000 trajectories: as many in one record would be a frame of tens of MB.
TOMBS_A_RECORD = 10_000


def capture(state: State, now: float) -> list[Captured]:
    """The records of a snapshot of the state."""
    written: set[bytes] = set()
    records: list[Captured] = []
    for channel in state.channels.values():
        records.extend(_channel(state, channel, now, written))
    for fact, header, body in image.capture(state.scored, state.next_cursor, now):
        records.append((encode(Commit([fact], header)), body))
    return records


def live_bytes(state: State) -> int:
    """Bytes of ids, log-probs, blobs and scored groups that a snapshot would hold."""
    total = sum(len(blob.data) for blob in list(state.blobs.values()))
    total += state.scored.pieces.memory + state.scored.pieces.spilled
    for channel in state.channels.values():
        for group in _all_groups(channel).values():
            for trajectory in group.trajectories.values():
                total += sum(
                    len(r.ids) + len(r.log_probs) + 64 + len(r.head.extra) for r in trajectory.tree.records.values()
                )
    return total


def _all_groups(channel: Channel) -> dict[int, GroupState]:
    """Every group whose content is held: live, kept for replay, or kept for a lost answer."""
    groups = dict(channel.groups)
    groups.update(channel.history)
    for lease in (*channel.replies.values(), *channel.leases.values()):
        handed_out = (*lease.groups, *lease.replayed, *(trajectory.group for trajectory, _ in lease.steps))
        groups.update((group.seq, group) for group in handed_out)
    return dict(sorted(groups.items()))


def _channel(state: State, channel: Channel, now: float, written: set[bytes]) -> Iterable[Captured]:
    counters = {**channel.ledger.as_dict(), "counts": dict(channel.ledger.counts), "cursor": state.next_cursor}
    tombs = iter([(uid, tomb.reason, tomb.prompt, tomb.digests) for uid, tomb in channel.tombs.items()])
    first = True
    while (some := tuple(islice(tombs, TOMBS_A_RECORD))) or first:
        image = f.ChannelImage(
            channel.name,
            now,
            channel.config,
            channel.version,
            channel.closed,
            channel.next_seq,
            channel.next_lease,
            counters,
            some,
            tuple((prompt, missing) for prompt, missing, _ in channel.expected_late),
            tuple(channel.acked),
            state.version,
            state.closed,
            channel.by_default,
            tuple(since for _, _, since in channel.expected_late),
        )
        yield encode(Commit([image])), []
        first = False
    groups = _all_groups(channel)
    for group in groups.values():
        yield _group(channel, group, now, written)
    leases = {id(lease): lease for lease in (*channel.leases.values(), *channel.replies.values())}
    places = {key: place for place, key in enumerate(leases)}
    replies = tuple(places[id(reply)] for reply in channel.replies.values())
    end = f.LeasesImage(channel.name, now, tuple(map(_lease, leases.values())), tuple(channel.history), replies)
    yield encode(Commit([end])), []


def _lease(lease: Lease) -> tuple[str, float, str, tuple[int, ...], tuple[tuple[str, int], ...], tuple[int, ...]]:
    return (
        lease.id,
        lease.deadline,
        lease.request,
        tuple(group.seq for group in lease.groups),
        tuple((trajectory.uid, index) for trajectory, index in lease.steps),
        tuple(group.seq for group in lease.replayed),
    )


def _group(channel: Channel, group: GroupState, now: float, written: set[bytes]) -> Captured:
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
    blobs = {blob.digest: blob.data for record in records for blob in record.blobs if blob.digest not in written}
    written.update(blobs)
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
    ids: list[Buffer] = [record.ids for record in records]
    probs: list[Buffer] = [record.log_probs for record in records if record.log_probs]
    sizes = [(digest, len(data)) for digest, data in blobs.items()]
    header = BlockHeader([record.head for record in records], sum(map(len, ids)), sum(map(len, probs)), sizes)
    return encode(Commit([image], header)), [*ids, *probs, *blobs.values()]


class SnapshotWriter:
    """A snapshot while it is written: nobody reads it before it is whole and on the disk.

    `add` its records, then `finish` puts it in place, at once and for good; `abandon` leaves no trace.
    """

    def __init__(self, files: Files, directory: Path, number: int, first_serial: int) -> None:
        self.path = snapshot_path(directory, number)
        self._files = files
        self._draft = self.path.with_suffix(".tmp")
        self._records = 0
        files.unlink(self._draft)
        self._fd = files.create(self._draft)
        try:
            files.write(self._fd, encode_head(SegmentHead(number, first_serial, time.time())))
        except BaseException:
            self.abandon()
            raise

    def add(self, header: bytes, body: Sequence[Buffer]) -> None:
        self._files.write(self._fd, encode_frame(FrameKind.COMMIT, header, body))
        self._records += 1

    def finish(self) -> Path:
        """Puts the snapshot in place, durable; its path."""
        self._files.write(self._fd, encode_snapshot_end(self._records))
        self._files.sync(self._fd)
        self._close()
        self._files.rename(self._draft, self.path)
        self._files.sync_dir(self.path.parent)
        return self.path

    def abandon(self) -> None:
        self._close()
        self._files.unlink(self._draft)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
