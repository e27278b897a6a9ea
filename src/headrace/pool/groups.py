"""What a channel holds: trajectories, groups, leases, tombstones and its ledger. `Channel` keeps them consistent.

The garbage collector does not track the records: with 100,000 groups queued it would spend a third of a submit's time
looking for cycles. The one cycle there is, a group and its trajectories, is broken by `Channel.sweep` when the group is
gone, and by `Channel.let_go` when the pool is closed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from headrace.data.block import Record, StepHead, pack_extra
from headrace.data.step import REWARD_SOURCE
from headrace.data.tree import TokenTree

OPEN = -2  # Trajectory.last before its end is known
FULL = 0  # the bucket of groups with all the trajectories they want
#: Why steps or groups are gone that a journal had and lost.
DAMAGED = "damaged"
DIGEST = 4  # bytes of a step's fingerprint in a tombstone
#: Why a trajectory is gone whose agent, or whose reward, failed.
FAILED = "failed"
#: Why a lease ended whose holder gave it back.
NACK = "nack"
#: The source of rewards that no other source replaces.
PERSON = "person"
_SOURCE = REWARD_SOURCE.encode()


class TrajectoryState(msgspec.Struct, eq=False, gc=False):
    """`last`: the index of its last step, once its end is known; `counted`: it counts for its group."""

    uid: str
    group: GroupState
    tree: TokenTree = msgspec.field(default_factory=TokenTree)
    last: int = OPEN
    completed_at: float = 0.0
    n_rollouts: int | None = None
    metadata: bytes = b""
    rewarded: bool = False
    counted: bool = False
    calls: dict[str, int] | None = None
    # Step indices handed out one by one (`unit="step"`): under a lease, and for good.
    leased_steps: set[int] | None = None
    consumed: set[int] | None = None
    deliveries: dict[int, int] | None = None

    def deliver(self, index: int) -> None:
        """Counts a hand-out of a single step."""
        if self.deliveries is None:
            self.deliveries = {}
        self.deliveries[index] = self.deliveries.get(index, 0) + 1

    def handed_out(self, index: int) -> bool:
        """Whether a step is with a consumer, or was: with its group, or by itself."""
        return bool(self.group.lease) or index in (self.leased_steps or ()) or index in (self.consumed or ())


class GroupState(msgspec.Struct, eq=False, gc=False):
    """The trajectories of one prompt that are handed out together. `seq` is its number, by age."""

    uid: str
    seq: int
    touched: float
    trajectories: dict[str, TrajectoryState] = {}
    seen: int = 0  # trajectories that ever joined
    n: int = 0  # what its trajectories asked for; 0: the channel's n_rollouts
    counted: tuple[str, ...] = ()  # trajectories that count, in the order in which they came to count
    oldest: int | None = None
    queued: int = 0
    leased: int = 0
    lease: str = ""
    deliveries: int = 0
    partial: bool = False
    broken: bool = False  # some steps were handed out one by one: it is no group any more
    consumed: bool = False
    bucket: int | None = None


class Lease(msgspec.Struct, eq=False, gc=False):
    """What was handed out together: whole groups, replayed ones, or single steps as (trajectory, index). `at`: when, of
    one that is remembered by its request."""

    id: str
    deadline: float
    request: str
    groups: list[GroupState] = []
    steps: list[tuple[TrajectoryState, int]] = []
    replayed: list[GroupState] = []
    at: float = 0.0

    def all_groups(self) -> list[GroupState]:
        """Every group of which it has something."""
        return [*self.groups, *self.replayed, *(trajectory.group for trajectory, _ in self.steps)]

    def holds(self, uid: str) -> bool:
        """Whether it holds steps of a trajectory."""
        return any(uid in group.trajectories for group in (*self.groups, *self.replayed)) or any(
            trajectory.uid == uid for trajectory, _ in self.steps
        )


class Tombstone(msgspec.Struct, eq=False, gc=False):
    """What is left of a trajectory: why it went, its group, and a fingerprint a step, zeros where one is missing; no
    fingerprints where most are."""

    reason: str
    prompt: str
    digests: bytes


class FailedTrajectory(msgspec.Struct, eq=False, gc=False):
    """What is told of a trajectory that failed, for as long as its tombstone is kept. `number` counts the failed ones
    of the channel; `quarantined`: its steps were not dropped, they went to the ledger's quarantined."""

    number: int
    reason: str
    steps: int
    at: float
    quarantined: bool = False


def fingerprint(record: Record) -> bytes:
    """What a tombstone keeps of a step: enough to tell a retry from other content under the same index."""
    if record.stored is not None:
        return record.stored.fingerprint.to_bytes(DIGEST, "little")
    whole_prompt = record.head.keep + record.head.n_prompt
    return crc32c(record.log_probs, crc32c(record.response, whole_prompt)).to_bytes(DIGEST, "little")


def is_quarantined(record: Record) -> bool:
    return record.head.peek().quarantined is not None


def replace_extra(record: Record, extra: bytes) -> None:
    """Gives a step another extra. One that is quarantined stays so: where a journal lost what the step needs, what was
    written about it later does not know."""
    reason = record.head.peek().quarantined
    record.head.extra = extra
    if reason is not None and not is_quarantined(record):
        found = record.head.unpack_extra()
        found.quarantined = reason
        record.head.extra = pack_extra(found)


def is_persons_reward(head: StepHead) -> bool:
    """Whether a step has a reward that a person gave."""
    if head.reward is None or _SOURCE not in head.extra:
        return False  # most steps: nothing is decoded for them
    return head.unpack_extra().metadata.get(REWARD_SOURCE) == PERSON


def quarantined_steps(trajectory: TrajectoryState) -> int:
    return sum(1 for record in trajectory.tree.records.values() if is_quarantined(record))


class Ledger:
    """Where every step went. `submitted = queued + leased + consumed + sum(dropped) + quarantined`, always."""

    __slots__ = ("consumed", "counts", "dropped", "leased", "quarantined", "queued", "submitted")

    def __init__(self) -> None:
        self.submitted = self.queued = self.leased = self.consumed = self.quarantined = 0
        self.dropped: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # what is not a step: duplicates, late rewards, redeliveries, ...

    def as_dict(self) -> dict[str, Any]:
        return {
            "submitted": self.submitted,
            "queued": self.queued,
            "leased": self.leased,
            "consumed": self.consumed,
            "dropped": dict(self.dropped),
            "quarantined": self.quarantined,
        }

    @property
    def balanced(self) -> bool:
        """Whether every step is somewhere."""
        placed = self.queued + self.leased + self.consumed + sum(self.dropped.values()) + self.quarantined
        return self.submitted == placed


class Reconciled(NamedTuple):
    """`submitted` in all; `consumed` beyond those known to be; `lost`: neither here nor known to have gone."""

    submitted: int
    consumed: int
    lost: int


def reconcile(submitted: int, consumed: int, *, here: int, gone: int, known_consumed: int) -> Reconciled:
    """A ledger behind a hole in the journal, where `submitted` and `consumed` are what it said there, and `here`,
    `gone` (`known_consumed` among them) what the commits that read back come to."""
    missing = submitted - here - gone
    unseen = min(max(0, missing), max(0, consumed - known_consumed))
    return Reconciled(submitted - min(0, missing), unseen, max(0, missing - unseen))
