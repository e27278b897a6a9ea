"""Facts: everything that can change a pool's state. The journal holds facts and nothing else.

A fact says what was decided ("these groups were handed out"), never what to decide ("hand out some groups"), so that a
journal replays to the same state under any configuration and any later release: the time and every choice are in it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.pool.config import ChannelConfig


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happened in a channel, and when. Facts without a channel (an empty name) concern the whole pool."""

    channel: str
    at: float = 0.0


class Configured(Fact, tag="config", frozen=True):
    """A channel was given options."""

    config: ChannelConfig = ChannelConfig()


class Defaulted(Fact, tag="default", frozen=True):
    """A channel has the pool's default options: those it began with, or those that the pool was opened with since."""

    config: ChannelConfig = ChannelConfig()


class Versioned(Fact, tag="version", frozen=True):
    """`everywhere`: it holds for channels that are yet to come, too."""

    version: int = 0
    everywhere: bool = False


class Closed(Fact, tag="close", frozen=True):
    """A channel was shut down, or opened again; `everywhere`: channels that are yet to come, too."""

    closed: bool = True
    everywhere: bool = False


class Opened(Fact, tag="open", frozen=True):
    """A trajectory was announced, or moved, into the group of that number."""

    trajectory: str = ""
    prompt: str = ""
    metadata: bytes = b""
    n_rollouts: int | None = None
    group: int = -1


class Appended(Fact, tag="steps", frozen=True):
    """The steps of the record's block were taken, each into the group of that number. Where an earlier step was the
    last that a group waited for, later ones of its prompt begin another: of the number `behind`, or the next one above
    it that is free; without it (-1), of the channel's next."""

    groups: tuple[int, ...] = ()
    behind: int = -1


class Refused(Fact, tag="refused", frozen=True):
    """Steps that came too late for their group: counted as submitted and dropped."""

    trajectory: str = ""
    prompt: str = ""
    steps: int = 0
    reason: str = "late"


class Amended(Fact, tag="amend", frozen=True):
    """A step learned something: a reward, its end, metadata or curation (`extra`, whole)."""

    trajectory: str = ""
    index: int = 0
    reward: float | None = None
    is_last: bool = False
    extra: bytes | None = None


class Scored(Fact, tag="score", frozen=True):
    """Several steps of a trajectory got rewards together, as (index, reward, its `extra`, where that changed)."""

    trajectory: str = ""
    rewards: tuple[tuple[int, float, bytes | None], ...] = ()


class Completed(Fact, tag="complete", frozen=True):
    """The trajectory ends at `last` (-1: without any step)."""

    trajectory: str = ""
    last: int = -1


class Failed(Fact, tag="fail", frozen=True):
    """A trajectory failed: its steps were dropped, or quarantined, and its group waits for another in its place."""

    trajectory: str = ""
    reason: str = ""
    quarantine: bool = False


class LateReward(Fact, tag="late_reward", frozen=True):
    """A reward came after its step was handed out: only counted."""

    trajectory: str = ""
    reward: float = 0.0


class HandedOut(Fact, tag="handout", frozen=True):
    """Groups given to a consumer: consumed at once, or under a lease. `surplus` trajectories were left out."""

    groups: tuple[int, ...] = ()
    surplus: tuple[str, ...] = ()
    replayed: tuple[int, ...] = ()
    lease: str = ""
    deadline: float = 0.0
    request: str = ""


class StepsHandedOut(Fact, tag="handout_steps", frozen=True):
    """Single steps given to a consumer, as (trajectory, index)."""

    steps: tuple[tuple[str, int], ...] = ()
    lease: str = ""
    deadline: float = 0.0
    request: str = ""


class Acked(Fact, tag="ack", frozen=True):
    """A lease ended: what it held was used, and is consumed."""

    lease: str = ""


class Returned(Fact, tag="return", frozen=True):
    """A lease ended without an ack (`nack` or `expired`): what it held stands in its old place again."""

    lease: str = ""
    reason: str = "expired"


class Extended(Fact, tag="extend", frozen=True):
    """A lease has another deadline."""

    lease: str = ""
    deadline: float = 0.0


class Dropped(Fact, tag="drop", frozen=True):
    """Groups went without being handed out."""

    groups: tuple[int, ...] = ()
    reason: str = ""


class Trimmed(Fact, tag="partial", frozen=True):
    """Groups that timed out and are served with the trajectories they have; the others are dropped."""

    groups: tuple[int, ...] = ()


class Forgotten(Fact, tag="forget", frozen=True):
    """A trajectory was removed for good."""

    trajectory: str = ""


class ClockMoved(Fact, tag="clock", frozen=True):
    """The clock was set forward by so many seconds, or the pool was away for so long: every deadline moves with it. It
    concerns no channel alone."""

    by: float = 0.0


class Cut(Fact, tag="cut", frozen=True):
    """A torn tail was cut off the journal. It concerns no channel."""

    detail: str = ""


class Lost(Fact, tag="lost", frozen=True):
    """Commits were lost here, as the repair of the journal describes it. It concerns no channel."""

    detail: str = ""


class Tallied(Fact, tag="tally", frozen=True):
    """What a channel's ledger said behind a hole in the journal: steps submitted, consumed, and queued or leased.
    Without a channel it is that of scored groups: groups posted, served, and there."""

    submitted: int = 0
    consumed: int = 0
    live: int = 0


class Recounted(Fact, tag="recount", frozen=True):
    """Steps that are there, where the ledger said otherwise: the journal was repaired, and some were lost with it."""

    queued: int = 0
    leased: int = 0


class ChannelImage(Fact, tag="image", frozen=True):
    """A channel in a snapshot: all but its groups. `failed` are those of its tombstones whose trajectories failed, as
    (uid, number, reason, steps, at, quarantined)."""

    config: ChannelConfig = ChannelConfig()
    version: int = 0
    closed: bool = False
    next_seq: int = 0
    next_lease: int = 0
    ledger: dict[str, Any] = {}
    tombstones: tuple[tuple[str, str, str, bytes], ...] = msgspec.field(default=(), name="tombs")
    expected_late: tuple[tuple[str, int], ...] = msgspec.field(default=(), name="owed")
    acked: tuple[str, ...] = ()
    pool_version: int = 0
    pool_closed: bool = False
    by_default: bool = True
    expected_since: tuple[float, ...] = msgspec.field(default=(), name="owed_since")
    failed: tuple[tuple[str, int, str, int, float, bool], ...] = ()
    nacked: tuple[str, ...] = ()


class TrajectoryImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trajectory in a snapshot; its steps are in the group's block."""

    uid: str
    last: int = -2
    completed_at: float = 0.0
    n_rollouts: int | None = None
    metadata: bytes = b""
    consumed: tuple[int, ...] = ()
    deliveries: tuple[tuple[int, int], ...] = ()


class GroupImage(Fact, tag="group", frozen=True):
    """A group in a snapshot; the record's block holds its steps."""

    prompt: str = ""
    seq: int = 0
    touched: float = 0.0
    deliveries: int = 0
    partial: bool = False
    consumed: bool = False
    broken: bool = False
    seen: int = 0
    counted: tuple[str, ...] = msgspec.field(default=(), name="ripe")
    trajectories: tuple[TrajectoryImage, ...] = ()
    n: int = 0
    oldest: int | None = None
    open: bool = True


class LeasesImage(Fact, tag="leases", frozen=True):
    """The end of a channel in a snapshot: leases and remembered replies as (id, deadline, request, groups, steps,
    replayed), the replies' places among them, oldest first, with when each was handed out, and the history in its
    order."""

    leases: tuple[tuple[str, float, str, tuple[int, ...], tuple[tuple[str, int], ...], tuple[int, ...]], ...] = ()
    history: tuple[int, ...] = ()
    replies: tuple[int, ...] = ()
    replied_at: tuple[float, ...] = ()


AnyFact = (
    Configured
    | Defaulted
    | Versioned
    | Closed
    | Opened
    | Appended
    | Refused
    | Amended
    | Scored
    | Completed
    | Failed
    | LateReward
    | HandedOut
    | StepsHandedOut
    | Acked
    | Returned
    | Extended
    | Dropped
    | Trimmed
    | Forgotten
    | ClockMoved
    | Cut
    | Lost
    | Tallied
    | Recounted
    | ChannelImage
    | GroupImage
    | LeasesImage
)
