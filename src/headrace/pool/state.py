"""The pool's whole state: its channels, the scored groups, blobs and events. `headrace.pool.apply` changes it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from headrace.data.block import Blob, Block, Record, pack_extra
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL, ChannelConfig, Limits
from headrace.pool.errors import PoolFull
from headrace.pool.groups import TrajectoryState
from headrace.pool.payload_memory import PayloadMemory
from headrace.pool.scored.groups import ScoredGroups
from headrace.pool.trajectory_channels import TrajectoryChannels


class ChangeListener(Protocol):
    """Hears of every fact before it is applied."""

    def before(self, fact: f.Fact, block: Block | None) -> None: ...


class Event(msgspec.Struct, frozen=True):
    """A fact as `events()` shows it: `cursor` counts them, over restarts too."""

    cursor: int
    kind: str
    channel: str
    at: float
    detail: dict[str, Any]


class State:
    """The whole of a pool: what its calls read and its facts change."""

    def __init__(self, defaults: ChannelConfig, limits: Limits) -> None:
        self.defaults = defaults
        self.limits = limits
        self.channels: dict[str, Channel] = {}
        self.known_in = TrajectoryChannels()
        self.memory = PayloadMemory()
        self.touched: dict[str, Channel] = {}  # channels that facts were about, by the call that is under way
        self.scored = ScoredGroups(int(limits.desk_memory_mb * 1e6))
        self.blobs: WeakValueDictionary[bytes, Blob] = WeakValueDictionary()
        self.events: deque[Event] = deque(maxlen=limits.events_kept)
        self.next_cursor = 0
        # What was said of all channels holds for those that come later.
        self.version = 0
        self.closed = False
        self.orphans: Counter[str] = Counter()
        self.capture: ChangeListener | None = None  # the snapshot that is being taken
        self.unerased = False  # something that was forgotten still stands in the journal

    def channel(self, name: str) -> Channel:
        """The channel of that name, which is created where it is not there."""
        found = self.channels.get(name)
        if found is None:
            found = self.channels[name] = self._new(name)
            found.changed = True  # those who wait for it looked at one that was not there yet
        self.touched[name] = found
        return found

    def touch(self, names: Iterable[str]) -> None:
        """Has these channels looked at when the call ends, those of them that are there: a call may change what is
        made when it is first asked for, without a fact."""
        for name in names:
            channel = self.channels.get(name)
            if channel is not None:
                self.touched[name] = channel

    def look(self, name: str) -> Channel:
        """The channel as it is or would be; nothing is created."""
        return self.channels.get(name) or self._new(name)

    def find(self, trajectory: str, channel: str | None) -> tuple[Channel, TrajectoryState | None]:
        """The trajectory and its channel; without a channel's name, the one that knows it."""
        if channel is None:
            candidates = [self.channels[name] for name in self.known_in.names(trajectory)]
            for candidate in candidates:
                if trajectory in candidate.trajectories:
                    return candidate, candidate.trajectories[trajectory]
            if candidates:
                return candidates[0], None
        there = self.look(channel or DEFAULT_CHANNEL)
        return there, there.trajectories.get(trajectory)

    def _new(self, name: str) -> Channel:
        channel = Channel(name, self.defaults, len(self.channels), self.known_in, self.memory)
        channel.version, channel.closed = self.version, self.closed
        return channel

    def holds_blob(self, digest: bytes) -> bool:
        """Whether a live step refers to the blob, so that a recovery finds it without another copy."""
        blob = self.blobs.get(digest)
        return blob is not None and blob.uses > 0

    @property
    def timed(self) -> bool:
        """Whether anything here waits for a time."""
        channels = any(one.groups or one.leases or one.expected_late or one.replies for one in self.channels.values())
        return channels or bool(self.scored.leases or self.scored.heard or self.scored.silent)

    def tallies(self, names: Iterable[str]) -> list[tuple[str, int, int, int]]:
        """What the ledgers of those of the channels that are there say: submitted, consumed, and queued or leased. An
        empty name is that of scored groups: groups posted, served, and there."""
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
        """What must be written before facts about channels that are yet to come: the options these begin with.
        `PoolFull` where there are as many channels as there may be."""
        names = dict.fromkeys(fact.channel for fact in facts if fact.channel and fact.channel not in self.channels)
        if names and len(self.channels) + len(names) > self.limits.max_channels:
            raise PoolFull(
                f"channel {next(iter(names))!r} would be one more than the {self.limits.max_channels} that a pool may "
                "have (`max_channels` of its limits); nothing was taken: use one that is there, or raise the limit"
            )
        return [f.Defaulted(name, facts[0].at, self.defaults) for name in names]

    def sweep(self) -> None:
        """Lets go of what calls have ended; see `Channel.sweep`."""
        for channel in self.touched.values():
            channel.sweep()

    def let_go(self) -> None:
        """Frees what it holds; the state is of no use after this."""
        for channel in self.channels.values():
            channel.let_go()
        self.channels.clear()
        self.touched.clear()
        self.known_in.clear()
        self.scored.let_go()

    def record(self, kind: str, channel: str, at: float, **detail: Any) -> None:
        """Adds an event for `events()`."""
        self.events.append(Event(self.next_cursor, kind, channel, at, detail))
        self.next_cursor += 1

    def attach_blobs(self, record: Record, block: Block) -> None:
        """Gives a record its blobs: those that came with it, or the ones that are here already."""
        found = []
        for digest in record.head.blobs:
            blob = self.blobs.get(digest)
            if blob is None and digest in block.blobs:
                at = block.blob_at(digest)
                blob = self.blobs[digest] = self.memory.kept_blob(digest, block.blobs[digest], block.place, at)
            if blob is None:
                extra = record.head.unpack_extra()
                extra.quarantined = "a blob that it needs is lost"
                record.head.extra = pack_extra(extra)
            else:
                found.append(blob)
        record.blobs = tuple(found)

    def orphan(self, fact: f.Fact) -> None:
        """Counts a fact about what is not there."""
        self.orphans[type(fact).__name__] += 1
