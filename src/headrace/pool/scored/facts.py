"""What can happen to scored groups. Like all facts these say what was decided; none of them concerns a channel.

Their tags and fields are the journal's: they stay as they are, and new fields have a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.pool.facts import Fact
from headrace.pool.scored.types import EnvRegistration, Registration

#: A channel, and the trajectories of it that a group was made of.
MadeOf = tuple[str, tuple[str, ...]]


class PostedGroup(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A group without its bytes, which are the record's blob `blob_name(number)`. `trajectories`: those of a channel
    that it was made of, where it came from there."""

    number: int
    size: int  # bytes of its JSON
    crc: int
    sequences: int = 0
    env: int | None = None
    key: str = ""
    channel: str = ""
    trajectories: tuple[str, ...] = ()


class TrainerRegistered(Fact, tag="desk_register", frozen=True):
    """A trainer registered; without a registration, under the settings that hold. `step`: where its count begins.
    `by_fetch`: nobody registered, a consumer fetched from the channel that is served."""

    uuid: str = ""
    registration: Registration | None = None
    step: int | None = None
    by_fetch: bool = False


class TrainerStarted(Fact, tag="desk_start", frozen=True):
    """The trainer asked for its first batch."""


class TrainerEnded(Fact, tag="desk_end", frozen=True):
    """The trainer takes no more batches."""


class BatchFetched(Fact, tag="desk_fetched", frozen=True):
    """A batch of the channel that is served was handed out: a step, unless its lease, where it has one, is returned."""

    lease: str = ""


class EnvJoined(Fact, tag="desk_join", frozen=True):
    """An environment registered, under the id `env`; `request` tells a retry of it from another."""

    env: int = 0
    registration: EnvRegistration | None = None
    name: str = ""
    request: str = ""


class EnvLeft(Fact, tag="desk_leave", frozen=True):
    """An environment disconnected; its groups stay."""

    env: int = 0


class GroupsPosted(Fact, tag="desk_post", frozen=True):
    """Groups were taken in; their bytes are the record's blobs."""

    groups: tuple[PostedGroup, ...] = ()


class KeysForgotten(Fact, tag="desk_forget", frozen=True):
    """Keys that will not be sent again: a group that comes under one of them is another group."""

    keys: tuple[tuple[int | None, str], ...] = ()


class BatchHandedOut(Fact, tag="desk_handout", frozen=True):
    """Groups went to the trainer as one batch, under a lease."""

    groups: tuple[int, ...] = ()
    lease: str = ""
    deadline: float = 0.0
    request: str = ""


class BatchAcked(Fact, tag="desk_ack", frozen=True):
    """A batch arrived: its groups are served."""

    lease: str = ""


class BatchReturned(Fact, tag="desk_return", frozen=True):
    """A lease ended without an ack (`nack`, `expired` or `released`): its groups stand in their places again."""

    lease: str = ""
    reason: str = "expired"


class BatchReceived(Fact, tag="desk_received", frozen=True):
    """The trainer had the batch of a lease that was returned: those of its groups that still wait are gone."""

    lease: str = ""


class GroupsDropped(Fact, tag="desk_drop", frozen=True):
    """Groups that no batch will ever hold (`too_large`, `unmatched`), or that the journal lost (`damaged`)."""

    groups: tuple[int, ...] = ()
    kind: str = ""
    reason: str = ""


class GroupsMoved(Fact, tag="desk_move", frozen=True):
    """Groups went to the channel that is served; the same record takes them in there."""

    groups: tuple[int, ...] = ()


class ChannelServed(Fact, tag="desk_serve", frozen=True):
    """Scored groups and this channel serve from each other; without a name, from their own again."""


class ScoredReset(Fact, tag="desk_reset", frozen=True):
    """Trainer, environments and groups were forgotten; the ledger goes on."""


class ScoredImage(Fact, tag="desk", frozen=True):
    """All of scored groups in a snapshot, but for the groups' bytes."""

    registration: Registration | None = None
    uuids: tuple[str, ...] = ()
    started: bool = False
    step: int = 0
    environments: tuple[tuple[int, tuple[EnvRegistration, str]], ...] = ()
    joined: tuple[tuple[str, int], ...] = ()
    heard: tuple[tuple[int, float], ...] = ()
    batching: dict[str, Any] = msgspec.field(default_factory=dict)
    leases: tuple[tuple[str, float, str, tuple[int, ...], bool], ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    returned: tuple[tuple[str, tuple[int, ...]], ...] = ()
    repeated: tuple[int, ...] = ()
    keys: tuple[tuple[str, int], ...] = ()
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    dead: dict[str, int] = msgspec.field(default_factory=dict)
    misfits: dict[str, int] = msgspec.field(default_factory=dict)
    condemned: tuple[int, ...] = ()
    in_vain: tuple[tuple[int, int], ...] = ()
    misfit: str = ""
    latest: tuple[bytes, int, int] | None = None
    serving: str | None = None
    next_number: int = 0
    next_lease: int = 0
    cursor: int = 0
    training_ended: bool = False
    by_fetch: bool = False
    fetched: tuple[str, ...] = ()
    made_of: tuple[tuple[int, MadeOf], ...] = ()
    latest_of: MadeOf | None = None


class PiecesImage(Fact, tag="desk_pieces", frozen=True):
    """Groups' bytes in a snapshot."""

    groups: tuple[PostedGroup, ...] = ()


ScoredFact = (
    TrainerRegistered
    | TrainerStarted
    | TrainerEnded
    | BatchFetched
    | EnvJoined
    | EnvLeft
    | GroupsPosted
    | KeysForgotten
    | BatchHandedOut
    | BatchAcked
    | BatchReturned
    | BatchReceived
    | GroupsDropped
    | GroupsMoved
    | ChannelServed
    | ScoredReset
    | ScoredImage
    | PiecesImage
)


def blob_name(number: int) -> bytes:
    """The name under which a record's block has a group's bytes."""
    return number.to_bytes(8, "big")
