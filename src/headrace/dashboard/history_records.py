"""What a journal's history is made of; see `history`."""

from __future__ import annotations

import msgspec

#: A trajectory's or a group's place: its channel, and its uid or number.
TrajectoryKey = tuple[str, str]
GroupKey = tuple[str, int]


class SeenStep(msgspec.Struct, gc=False):
    """One call's step. `batches` are the numbers of the batches that it went out in by itself."""

    index: int
    at: float
    prompt_tokens: int
    response_tokens: int
    version: int
    call: str | None = None
    quarantined: str | None = None
    trainable: bool = True
    reward: float | None = None
    state: str = "queued"
    batches: tuple[int, ...] = ()


class SeenEvent(msgspec.Struct, gc=False, frozen=True):
    """What happened to a trajectory, in words; `batch` is the batch that it is about, 0 for none."""

    at: float
    words: str
    batch: int = 0


class SeenTrajectory(msgspec.Struct):
    """A trajectory's life. `state` is `queued`, `leased`, `consumed`, `failed`, or the reason of its drop. `known_from`
    is `snapshot` where a part of what happened was compacted away, `tombstone` where all of it was."""

    uid: str
    channel: str
    prompt: str
    group: int = -1
    state: str = "queued"
    known_from: str = "journal"
    last: int | None = None
    n_rollouts: int | None = None
    why: str = ""
    steps: dict[int, SeenStep] = {}
    events: list[SeenEvent] = []

    @property
    def complete(self) -> bool:
        """Whether it ended and every step up to its end is there."""
        return self.last is not None and len(self.steps) == self.last + 1

    @property
    def reward(self) -> float | None:
        """The sum of its steps' rewards; None where none was given."""
        given = [step.reward for step in self.steps.values() if step.reward is not None]
        return sum(given) if given else None


class SeenGroup(msgspec.Struct):
    """A group, with the trajectories that were in it when it left, or are in it."""

    prompt: str
    channel: str
    number: int
    uids: dict[str, None] = {}
    batches: tuple[int, ...] = ()


class SeenBatch(msgspec.Struct):
    """A batch that a consumer got. `state` is `leased`, `acked`, `consumed` (handed out without a lease), `nack` or
    `expired`; `again` counts groups that had been out before."""

    number: int
    channel: str
    at: float
    lease: str = ""
    deadline: float | None = None
    request: str = ""
    groups: tuple[int, ...] = ()
    replayed: tuple[int, ...] = ()
    steps: tuple[tuple[str, int], ...] = ()
    state: str = "leased"
    ended_at: float | None = None
    again: int = 0
