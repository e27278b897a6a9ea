"""Operations on scored groups: environments post them, a trainer takes them in exact batches."""

from __future__ import annotations

import uuid
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.pool.operation import Answer, Change, Plan, Read
from headrace.pool.scored import plans
from headrace.pool.scored.types import (
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    RegistrationResult,
    ScoredBatch,
    ScoredEnvStatus,
    ScoredInfo,
    ScoredStatus,
    check_posting,
    checked,
)
from headrace.pool.scored.types import read as as_record
from headrace.pool.state import State


def _concerned(state: State) -> list[str]:
    """The scored groups, and the channel with which they serve each other."""
    serving = state.scored.serving
    return ["", serving] if serving is not None else [""]


def _record_result(kind: type[Any]) -> Any:
    """An operation's `result` for an answer that is a record, or None; from another process it comes as a dict."""

    def result(self: Any, caller: Any, answer: Any) -> Any:
        return None if answer is None else as_record(answer, kind)

    return result


class ScoredChange(Change[Answer], frozen=True):
    """A change of the scored groups."""

    def concerned(self, state: State) -> list[str]:
        return _concerned(state)


class ScoredRead(Read[Answer], frozen=True):
    """A look at the scored groups."""

    def concerned(self, state: State) -> list[str]:
        return _concerned(state)


# -- trainers ----------------------------------------------------------------------------------------------------------


class RegisterTrainer(ScoredChange[RegistrationResult], frozen=True):
    """Takes a trainer in, under a `uuid` that its caller made up: the same again is the same registration."""

    name = "desk_register"

    registration: Any
    uuid: str
    resume: bool

    def plan(self, state: State, now: float) -> Plan:
        return plans.register(state, now, self.registration, self.uuid, resume=self.resume)

    def result(self, caller: Any, answer: str | None) -> RegistrationResult:
        return RegistrationResult(uuid.UUID(self.uuid).int, answer)


def desk_register(registration: Registration, *, resume: bool = False) -> RegisterTrainer:
    """Takes a trainer in. Where one registered before, its settings stay, with a warning if these are others; with
    `resume` these hold from now on. The queue stays either way."""
    return RegisterTrainer(checked(registration, Registration, "registration"), uuid.uuid4().hex, resume)


class _TakeBatch(ScoredChange[ScoredBatch | None], frozen=True):
    request_id: str = ""


class TakeScoredBatch(_TakeBatch, frozen=True, kw_only=True):
    """Scored groups of exactly `batch_size` sequences, or None where none make it up; never waits.

    They are the caller's until the lease ends; not acknowledged by then, they stand where they stood. The same
    `request_id` gets the same batch again meanwhile. `NotRegistered` before any trainer registered.
    """

    name = "desk_batch"

    lease_s: float = 60.0

    def plan(self, state: State, now: float) -> Plan:
        return plans.batch(state, now, self.request_id, self.lease_s)

    result = _record_result(ScoredBatch)


class AckScoredBatch(ScoredChange[None], frozen=True):
    """The batch arrived: its groups are gone for good."""

    name = "desk_ack"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        return plans.ack(state, now, self.lease_id)


class NackScoredBatch(ScoredChange[None], frozen=True):
    """The batch did not arrive: its groups go out again, and it does not count as a step."""

    name = "desk_nack"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        return plans.nack(state, now, self.lease_id)


class ConfirmScoredBatch(ScoredChange[None], frozen=True):
    """The trainer has this batch, whatever became of its lease: what still waits of it does not go out again."""

    name = "desk_received"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        return plans.received(state, now, self.lease_id)


class ReleaseScoredBatches(ScoredChange[None], frozen=True):
    """Every batch that is out goes back at once: for an API that was started anew and is the pool's only one."""

    name = "desk_release"

    def plan(self, state: State, now: float) -> Plan:
        return plans.release(state, now)


# -- environments ------------------------------------------------------------------------------------------------------


class RegisterEnvironment(ScoredChange[EnvRegistered | None], frozen=True):
    """Takes an environment in."""

    name = "desk_register_env"

    environment: Any
    request_id: str

    def plan(self, state: State, now: float) -> Plan:
        return plans.register_env(state, now, self.environment, self.request_id)

    result = _record_result(EnvRegistered)


def desk_register_env(environment: EnvRegistration, request_id: str = "") -> RegisterEnvironment:
    """Takes an environment in; None until the trainer has asked for its first batch."""
    return RegisterEnvironment(checked(environment, EnvRegistration, "environment"), request_id)


class DisconnectEnvironment(ScoredChange[None], frozen=True):
    """The environment counts no longer towards weights and shares; its groups stay. `NotFound` if unknown."""

    name = "desk_disconnect"

    env_id: int

    def plan(self, state: State, now: float) -> Plan:
        return plans.disconnect(state, now, self.env_id)


class PostScoredGroups(ScoredChange[list[Posted]], frozen=True):
    """Takes all of the scored groups, or none."""

    name = "desk_post"

    postings: list[Any]
    request_id: str

    def plan(self, state: State, now: float) -> Plan:
        return plans.post(state, now, self.postings, self.request_id)

    def result(self, caller: Any, answer: list[Any]) -> list[Posted]:
        return [as_record(one, Posted) for one in answer]


def desk_post(postings: list[Posting], request_id: str = "") -> PostScoredGroups:
    """Takes all of the scored groups, or none. A `key` that its environment used before queues nothing."""
    if not isinstance(postings, list):
        raise InvalidInput(f"postings must be a list, not {shown(postings)}")
    for at, posting in enumerate(postings):
        check_posting(posting, at)
    return PostScoredGroups(postings, request_id)


class ForgetKeys(ScoredChange[None], frozen=True):
    """Forgets keys of posted groups, as pairs of an environment and a key."""

    name = "desk_forget"

    keys: list[Any]

    def plan(self, state: State, now: float) -> Plan:
        return plans.forget(state, now, self.keys)


def desk_forget(keys: list[tuple[int | None, str]]) -> ForgetKeys:
    """Forgets keys, each with its environment: whoever sent a group under one has its answer."""
    return ForgetKeys([list(key) for key in keys])


# -- control and reading -----------------------------------------------------------------------------------------------


class ServeFromChannel(ScoredChange[None], frozen=True):
    """Lets the scored groups and a channel serve from each other, where either has too few; None ends it."""

    name = "desk_serve"
    any_channel = True

    channel: str | None

    def plan(self, state: State, now: float) -> Plan:
        return plans.serve(state, now, self.channel)


class ResetScoredGroups(ScoredChange[None], frozen=True):
    """Forgets trainer, environments, groups and step."""

    name = "desk_reset"

    def plan(self, state: State, now: float) -> Plan:
        return plans.reset(state, now)


class ReadScoredInfo(ScoredRead[ScoredInfo], frozen=True):
    """What the trainer registered with, and whether it has started."""

    name = "desk_info"

    def read(self, state: State, now: float) -> ScoredInfo:
        return plans.info(state)

    result = _record_result(ScoredInfo)


class ReadScoredStatus(ScoredRead[ScoredStatus], frozen=True):
    """Batches handed out, and groups queued."""

    name = "desk_status"

    def read(self, state: State, now: float) -> ScoredStatus:
        return plans.status(state)

    result = _record_result(ScoredStatus)


class ReadEnvironmentStatus(ScoredRead[ScoredEnvStatus], frozen=True):
    """How long the queue is for one environment, and its weight among those that called within `heartbeat_s`."""

    name = "desk_env_status"

    env_id: int
    heartbeat_s: float | None = None

    def read(self, state: State, now: float) -> ScoredEnvStatus:
        return plans.env_status(state, now, self.env_id, self.heartbeat_s)

    result = _record_result(ScoredEnvStatus)


class ReadLatestGroup(ScoredRead[Piece | None], frozen=True):
    """The group that entered the queue last, also once it is gone."""

    name = "desk_latest"

    def read(self, state: State, now: float) -> Piece | None:
        return plans.latest(state)

    result = _record_result(Piece)
