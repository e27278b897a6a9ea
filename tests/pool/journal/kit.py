"""What the journal's tests share: a whole state as plain values, rules that every state keeps, and files that fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace import DataPool, Step
from headrace.data.frame import Buffer
from headrace.pool.channel import Channel
from headrace.pool.groups import (
    FAILED,
    OPEN,
    GroupState,
    Lease,
    TrajectoryState,
    is_quarantined,
)
from headrace.pool.journal.files import Files, segment_path
from headrace.pool.journal.records import Reader
from headrace.pool.scored.groups import ScoredGroups
from headrace.pool.scored.piece_store import load
from headrace.pool.state import State

# -- steps -------------------------------------------------------------------------------------------------------------


def one(
    uid: str, prompt: str | None = None, index: int = 0, *, last: bool = True, size: int = 2, **fields: Any
) -> Step:
    """A step whose ids tell which it is."""
    first = sum(uid.encode()) * 100 + index
    made: dict[str, Any] = {
        "prompt_ids": [1, 2, 3],
        "response_ids": list(range(first, first + size)),
        "rollout_log_probs": [-0.5] * size,
        "trajectory_uid": uid,
        "prompt_uid": prompt or uid,
        "step_index": index,
        "is_last": last,
    }
    return Step(**{**made, **fields})


def uids(pool: DataPool, channel: str = "train") -> list[str]:
    """The trajectories that are there, by age."""
    return [row["trajectory_uid"] for row in pool.list_trajectories(channel, limit=10_000)["items"]]


# -- files on disk -----------------------------------------------------------------------------------------------------


def segment(folder: Path, number: int = 1) -> Path:
    return segment_path(folder, number)


def frames(path: Path) -> list[tuple[int, int]]:
    """Where each frame of a file begins and ends."""
    found: list[tuple[int, int]] = []
    with Reader(path) as reader:
        while (at := found[-1][1] if found else 0) < reader.size:
            found.append((at, at + reader.frame_at(at).size))
    return found


def flip(path: Path, at: int) -> None:
    """Turns one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


# -- the whole state ---------------------------------------------------------------------------------------------------


def dump(state: State) -> dict[str, Any]:
    """Everything that a recovery must bring back, as plain values."""
    return {
        "version": state.version,
        "closed": state.closed,
        "cursor": state.next_cursor,
        "channels": {name: _channel(channel) for name, channel in sorted(state.channels.items())},
        "desk": _desk(state.scored),
    }


def _desk(d: ScoredGroups) -> dict[str, Any]:
    plain = ("registration", "uuids", "started", "step", "environments", "joined", "names", "keys", "ended", "serving")
    numbers = ("returned", "repeated", "counts", "dead", "next_number", "next_lease", "made_of", "latest_of")
    return {
        **{name: getattr(d, name) for name in (*plain, *numbers)},
        "batching": d.batching.state(),
        "pieces": {number: d.pieces.piece(number) for number in d.batching.numbers()},
        "leases": {id: msgspec.structs.astuple(lease) for id, lease in d.leases.items()},
        "requests": {request: lease.id for request, lease in d.requests.items()},
        "latest": d.latest and load(d.latest),
    }


def _channel(c: Channel) -> dict[str, Any]:
    return {
        "config": msgspec.structs.asdict(c.config),
        "by_default": c.by_default,
        "version": c.version,
        "closed": c.closed,
        "next_seq": c.next_seq,
        "next_lease": c.next_lease,
        "ledger": {name: value for name, value in c.ledger.as_dict().items() if name != "dropped"},
        "dropped": {reason: n for reason, n in c.ledger.dropped.items() if n},
        "counts": {name: n for name, n in c.ledger.counts.items() if n},
        "groups": {seq: _group(c.groups[seq]) for seq in sorted(c.groups)},
        "open": {prompt: group.seq for prompt, group in sorted(c.open_groups.items())},
        "trajectories": sorted(c.trajectories),
        "waiting": list(c.waiting),
        "ready": {bucket: list(seqs) for bucket, seqs in sorted(c.ready.items()) if len(seqs)},
        "leases": {id: _lease(lease) for id, lease in sorted(c.leases.items())},
        "replies": [(request, reply.at, _lease(reply)) for request, reply in c.replies.items()],
        "history": [_group(group) for group in c.history.values()],
        "tombs": [(uid, tomb.reason, tomb.prompt, tomb.digests) for uid, tomb in c.tombstones.items()],
        "failed": {uid: msgspec.structs.astuple(failed) for uid, failed in c.failed.items()},
        "expected_late": sorted(c.expected_late),
        "acked": list(c.acked),
        "nacked": list(c.nacked),
    }


def _group(g: GroupState) -> dict[str, Any]:
    plain = ("uid", "seq", "touched", "seen", "n", "oldest", "queued", "leased", "lease", "deliveries", "partial")
    row = {name: getattr(g, name) for name in (*plain, "broken", "consumed", "bucket")}
    return {**row, "counted": list(g.counted), "trajectories": [_trajectory(t) for t in g.trajectories.values()]}


def _trajectory(t: TrajectoryState) -> dict[str, Any]:
    row = {
        name: getattr(t, name)
        for name in ("uid", "last", "completed_at", "n_rollouts", "metadata", "rewarded", "counted")
    }
    return {
        **row,
        "calls": t.calls or {},
        "leased_steps": sorted(t.leased_steps or ()),
        "consumed": sorted(t.consumed or ()),
        "deliveries": dict(sorted((t.deliveries or {}).items())),
        "steps": {
            index: (msgspec.structs.asdict(r.head), r.ids, r.log_probs, [blob.data for blob in r.blobs])
            for index, r in sorted(t.tree.records.items())
        },
    }


def _lease(lease: Lease) -> tuple[Any, ...]:
    return (
        lease.id,
        lease.deadline,
        lease.request,
        [_group(group) for group in lease.groups],
        [(t.uid, index, t.tree.prompt(index), t.tree.records[index].ids) for t, index in lease.steps],
        [_group(group) for group in lease.replayed],
    )


def check_rules(state: State) -> None:
    """What holds in every state, counted anew from what is there."""
    for channel in state.channels.values():
        _check_channel(channel)
    known = {uid for channel in state.channels.values() for uid in (*channel.trajectories, *channel.tombstones)}
    assert len(state.known_in) == len(known)
    for uid in known:
        there = [name for name, c in state.channels.items() if uid in c.trajectories or uid in c.tombstones]
        assert state.known_in.names(uid) == there
    _check_memory(state)
    _check_desk(state.scored)


def _check_memory(state: State) -> None:
    """Payloads are counted where they are."""
    groups: dict[int, GroupState] = {}
    for c in state.channels.values():
        leases = (*c.leases.values(), *c.replies.values())
        handed_out = [group for lease in leases for group in (*lease.groups, *lease.replayed)]
        handed_out += [t.group for lease in leases for t, _ in lease.steps]
        groups.update((id(group), group) for group in (*c.groups.values(), *c.history.values(), *handed_out))
    trees = [t.tree for group in groups.values() for t in group.trajectories.values()]
    records = [record for tree in trees for record in tree.records.values()]
    blobs = [blob for blob in state.blobs.values() if blob.freed is not None]
    counted = {
        stored: sum(r.array_bytes for r in records if (r.stored is not None) == stored)
        + sum(blob.size for blob in blobs if (blob.stored is not None) == stored)
        for stored in (False, True)
    }
    assert (state.memory.used, state.memory.in_journal) == (counted[False], counted[True])
    assert all((record.ids_in_memory is None) == (record.stored is not None) for record in records)
    assert state.memory.limit is None or state.memory.used <= state.memory.limit


def _check_desk(d: ScoredGroups) -> None:
    assert d.balanced, d.stats()
    assert not d.lost()
    assert sum(d.batching.places().values()) == len(d.pieces)
    out = [number for lease in d.leases.values() for number in lease.groups if d.batching.knows(number)]
    assert len(out) == len(set(out)) == d.batching.places()["out"]
    assert all(d.batching.is_out(number) for number in out)


def _check_channel(c: Channel) -> None:
    ledger = c.ledger
    assert ledger.balanced, ledger.as_dict()
    assert min(ledger.queued, ledger.leased, ledger.consumed, ledger.quarantined, *ledger.dropped.values(), 0) == 0, (
        ledger.as_dict()
    )
    queued = leased = 0
    for seq, group in c.groups.items():
        assert group.seq == seq
        of_group = [_count(t, bool(group.lease)) for t in group.trajectories.values()]
        assert (group.queued, group.leased) == (sum(q for q, _ in of_group), sum(n for _, n in of_group))
        queued, leased = queued + group.queued, leased + group.leased
        assert all(c.trajectories[uid] is t and t.group is group for uid, t in group.trajectories.items())
        assert sorted(group.counted) == sorted(uid for uid, t in group.trajectories.items() if t.counted)
        assert (group.lease in c.leases) == bool(group.lease)
        assert (seq in c.waiting) == (not group.lease and not group.leased), group
        assert (group.bucket is not None) == any(seq in bucket for bucket in c.ready.values())
    assert (queued, leased) == (ledger.queued, ledger.leased)
    assert sum(len(group.trajectories) for group in c.groups.values()) == len(c.trajectories)
    assert set(c.waiting) <= c.groups.keys()
    for prompt, group in c.open_groups.items():
        assert c.groups.get(group.seq) is group
        assert group.uid == prompt
    for lease in c.leases.values():
        assert all(c.groups.get(group.seq) is group and group.lease == lease.id for group in lease.groups)
        assert all(index in (t.leased_steps or ()) and c.trajectories[t.uid] is t for t, index in lease.steps)
    for trajectory in c.trajectories.values():
        _check_tree(trajectory)
    if c.single_steps is not None:
        kept, c.single_steps = c.single_steps, None
        assert list(kept) == list(c.offered())
    assert c.failed.keys() == {uid for uid, tomb in c.tombstones.items() if tomb.reason == FAILED}
    if c.unscored is not None:
        waiting, c.unscored = c.unscored, None
        assert sorted(waiting) == sorted(c.trajectories_to_score())
        c.unscored = waiting
    if c.unscored_steps is not None:
        steps, c.unscored_steps = c.unscored_steps, None
        assert sorted(steps) == sorted(c.steps_to_score())
        c.unscored_steps = steps


def _count(t: TrajectoryState, leased: bool) -> tuple[int, int]:
    """(queued, leased) steps of a trajectory."""
    live = [i for i, r in t.tree.records.items() if not is_quarantined(r) and i not in (t.consumed or ())]
    if leased:
        return 0, len(live)
    given = [i for i in live if i in (t.leased_steps or ())]
    return len(live) - len(given), len(given)


def _check_tree(t: TrajectoryState) -> None:
    for index, record in t.tree.records.items():
        assert record.head.step_index == index
        assert record.head.base < 0 or record.head.base in t.tree.records
        assert record.head.is_last == (index == t.last) or t.last == OPEN
        t.tree.prompt(index)


# -- files that fail ---------------------------------------------------------------------------------------------------


class Unsynced(Files):
    """Files of a test that asks for speed: nothing of it ends with the machine."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, directory: Path) -> None:
        pass


class Crashing(Unsynced):
    """Files whose process can be ended: `crash` takes the descriptors away, and with them the lock."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def create(self, path: Path) -> int:
        return self._keep(super().create(path))

    def append_to(self, path: Path) -> int:
        return self._keep(super().append_to(path))

    def open_to_update(self, path: Path) -> int:
        return self._keep(super().open_to_update(path))

    def lock(self, directory: Path) -> int:
        return self._keep(super().lock(directory))

    def close(self, fd: int) -> None:
        self.open.discard(fd)
        super().close(fd)

    def unlock(self, fd: int) -> None:
        self.open.discard(fd)
        super().unlock(fd)

    def crash(self) -> None:
        while self.open:
            os.close(self.open.pop())

    def _keep(self, fd: int) -> int:
        self.open.add(fd)
        return fd


class Failing(Files):
    """Files that fail when they are told to: `fail` maps a call's name to the error that it raises next."""

    def __init__(self) -> None:
        self.fail: dict[str, OSError] = {}
        self.before: dict[str, Callable[[], None]] = {}

    def _meet(self, call: str) -> None:
        if call in self.before:
            self.before.pop(call)()
        if call in self.fail:
            raise self.fail.pop(call)

    def create(self, path: Path) -> int:
        self._meet("create")
        return super().create(path)

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        if "write_half" in self.fail:
            data = b"".join(buffers)
            super().write(fd, [data[: len(data) // 2]])
            raise self.fail.pop("write_half")
        self._meet("write")
        super().write(fd, buffers)

    def sync(self, fd: int) -> None:
        self._meet("sync")
        super().sync(fd)

    def sync_dir(self, directory: Path) -> None:
        self._meet("sync_dir")
        super().sync_dir(directory)

    def truncate(self, fd: int, size: int) -> None:
        self._meet("truncate")
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._meet("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)


# -- comparing ---------------------------------------------------------------------------------------------------------


def same(before: Any, after: Any) -> bool:
    """Asserts that nothing changed, naming what did."""
    found = differences(before, after)
    assert not found, "\n".join(found)
    return True


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two plain values differ, in words."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        return [
            line
            for key in keys
            for line in (
                differences(a[key], b[key], f"{path}.{key}")
                if key in a and key in b
                else [f"{path}.{key}: only {'before' if key in a else 'after'}"]
            )
        ]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [line for at, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{path}[{at}]")]
    return [] if a == b else [f"{path}: {a!r} before, {b!r} after"]
