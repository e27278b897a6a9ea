"""What a run of rollouts is told and what it keeps: its rules, its state, and what `RolloutSchedule` hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.data.errors import InvalidInput
from headrace.flows.task import trajectory_uid_of

FailedGroups = Literal["replace", "partial"]
Outcome = Literal["", "accepted", "failed"]

TRAIN, VAL = "train", "val"

#: The format of a kept state. A release that writes what this one would misread, or forget, raises it.
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRules:
    """What holds for a run.

    rows, val_rows      prompts in the data
    n_rollouts          rollouts of a prompt; val_rollouts: of one of the validation's
    batch_size          groups that the trainer learns from in a version
    max_staleness       versions that a group may be behind when it is learned from
    concurrency         rollouts at once
    retries             attempts after a rollout's first
    retry_s             seconds before the first of them, doubled for each further one
    steps               training steps that are supplied, with as many passes over the data as that takes; None: one
                        pass for each of `epochs`
    validate_every      versions between two validations; 0: none
    failed_groups       a group with a rollout that failed for good: another prompt is played in its place (`replace`),
                        or it counts, since the pool hands it out without that one when its time is over (`partial`)
    max_failed_groups   groups that fail one after the other, with none accepted between them, before it is given up
    scored              a group runs until each of its trajectories has its reward
    until_trained       it is not over before the trainer has used all groups: one that the pool drops is replaced
    """

    rows: int
    n_rollouts: int
    batch_size: int
    max_staleness: int = 1
    concurrency: int = 64
    retries: int = 2
    retry_s: float = 0.5
    steps: int | None = None
    epochs: int = 1
    val_rows: int = 0
    val_rollouts: int = 1
    validate_every: int = 0
    failed_groups: FailedGroups = "replace"
    max_failed_groups: int = 20
    scored: bool = False
    until_trained: bool = False
    shuffle: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_rollouts", "batch_size", "concurrency", "epochs", "val_rollouts", "max_failed_groups"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_staleness", "retries", "retry_s", "val_rows", "validate_every"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.steps is not None and self.steps < 1:
            raise InvalidInput(f"steps is {self.steps}; it must be at least 1, or left out")
        if self.rows + self.val_rows < 1:
            raise InvalidInput("there are no rows to play")
        if self.validate_every and not self.val_rows:
            raise InvalidInput(f"validate_every is {self.validate_every}, but there are no rows to validate on")

    @property
    def groups(self) -> int:
        """How many groups are accepted at most."""
        if self.steps is None or not self.rows:
            return self.epochs * self.rows
        return self.steps * self.batch_size

    @property
    def follows_pool(self) -> bool:
        """Whether accepted groups are followed until the trainer has used them: where one that is dropped would take
        room from others, or is to be replaced."""
        return self.until_trained or (self.max_staleness + 1) * self.batch_size < self.groups

    @property
    def prompts(self) -> int | None:
        """How many prompts are admitted at most; None: as many as are needed."""
        return self.groups if self.steps is None or not self.rows else None


class AdmittedGroup(msgspec.Struct):
    """A group that was admitted and is not accepted yet. Each list has an item for each rollout."""

    channel: str
    #: The pass over the data; of a validation, its version.
    epoch: int
    row: int
    #: The version that it was admitted under, or, by a poll that is behind, an older one.
    version: int
    attempts: list[int]
    #: How many of the attempts were charged.
    failures: list[int]
    #: `""` until it has one.
    outcomes: list[Outcome]

    @property
    def over(self) -> bool:
        """Whether nothing of it is to be played."""
        return all(self.outcomes)


class HeldGroup(msgspec.Struct, array_like=True):
    """A training group that was accepted and that the trainer has not used, for all that is known. `attempts` has the
    one that is complete of each rollout, or -1 where there is none."""

    epoch: int
    row: int
    attempts: list[int]


class ValidationRound(msgspec.Struct):
    """A validation under way: the version that it began with, and how many of its rows were admitted."""

    version: int
    admitted: int = 0


class ScheduleState(msgspec.Struct):
    """Where a run stands: all that a later process needs to go on.

    `run` is part of every uid, so that two runs on one pool do not meet. `admitted` counts the groups of both channels,
    `position` the prompts of the training data, `accepted` the groups that the trainer has used or may still use, and
    `dropped` those that were accepted and that the pool then dropped, by its reason.
    """

    run: str
    rows: int
    val_rows: int = 0
    base_version: int | None = None
    version: int = 0
    admitted: int = 0
    position: int = 0
    accepted: int = 0
    lost: int = 0
    lost_in_a_row: int = 0
    rollouts: int = 0
    val_rollouts: int = 0
    retried: int = 0
    failed: dict[str, int] = {}
    dropped: dict[str, int] = {}
    open: dict[int, AdmittedGroup] = {}
    held: dict[int, HeldGroup] = {}
    validation: ValidationRound | None = None
    validated: list[int] = []
    format_version: int = FORMAT_VERSION


class RolloutStart(msgspec.Struct, frozen=True):
    """One attempt of one rollout. `group` is the number of its group."""

    group: int
    rollout: int
    attempt: int
    channel: str
    row: int
    n_rollouts: int
    prompt_uid: str

    @property
    def trajectory_uid(self) -> str:
        """The attempt's name in the pool, as its task has it."""
        return trajectory_uid_of(self.prompt_uid, self.rollout, self.attempt)


class LostGroup(msgspec.Struct, frozen=True):
    """What is left of a group that is given up: rollouts that run, to be ended, and complete ones, from which nobody is
    to learn."""

    running: list[RolloutStart]
    complete: list[RolloutStart]
