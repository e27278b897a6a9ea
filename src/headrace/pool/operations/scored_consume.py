"""Operations of trainers on scored groups: who trains, which groups make the next batch, and whether it arrived.

Planning a batch may put bytes that come from a channel into a scratch file, ahead of the fact that takes them.
"""

from __future__ import annotations

import uuid
from typing import Any

from headrace.data.step import check_count, check_uid
from headrace.pool.config import lease_seconds
from headrace.pool.errors import LeaseLost, NotRegistered
from headrace.pool.operation import Plan, ScoredChange, ScoredRead, result_as
from headrace.pool.operations.transfer import from_channel
from headrace.pool.scored import facts
from headrace.pool.scored.groups import BatchLease, ScoredGroups
from headrace.pool.scored.types import (
    Registration,
    RegistrationResult,
    ScoredBatch,
    ScoredInfo,
    ScoredStatus,
    checked,
)
from headrace.pool.state import State

# -- the run -----------------------------------------------------------------------------------------------------------


class RegisterTrainer(ScoredChange[RegistrationResult], frozen=True):
    """Takes a trainer in, under a `uuid` that its caller made up: the same again is the same registration."""

    name = "desk_register"

    registration: Any
    uuid: str
    resume: bool
    restart: bool = False

    def plan(self, state: State, now: float) -> Plan:
        registration = checked(self.registration, Registration, "registration")
        check_uid(self.uuid, "uuid")
        scored, current = state.scored, state.scored.registration
        if self.uuid in scored.uuids and current is not None:
            return Plan(reply=_warning(registration, current))
        if current is None or scored.by_fetch or self.restart:
            return Plan([facts.TrainerRegistered("", now, self.uuid, registration, registration.starting_step)])
        if self.resume and registration != current:
            step = registration.starting_step if registration.starting_step != current.starting_step else None
            return Plan([facts.TrainerRegistered("", now, self.uuid, registration, step)])
        return Plan([facts.TrainerRegistered("", now, self.uuid)], reply=_warning(registration, current))

    def result(self, caller: Any, answer: str | None) -> RegistrationResult:
        return RegistrationResult(uuid.UUID(self.uuid).int, answer)


def desk_register(registration: Registration, *, resume: bool = False, restart: bool = False) -> RegisterTrainer:
    """Takes a trainer in. Where one registered before, its settings stay, with a warning if these are others; with
    `resume` these hold from now on, with `restart` its `starting_step` too. The queue stays either way."""
    return RegisterTrainer(checked(registration, Registration, "registration"), uuid.uuid4().hex, resume, restart)


def _warning(registration: Registration, current: Registration) -> str | None:
    """What of a registration does not hold, since another came first; None where both say the same."""
    if registration == current:
        return None
    other = [name for name in Registration.__struct_fields__ if getattr(registration, name) != getattr(current, name)]
    kept = ", ".join(f"{name} stays {getattr(current, name)!r}" for name in other)
    return (
        f"a trainer registered before with other settings, which hold: {kept}. "
        "Register with resume true to change them and keep the queue, or reset first"
    )


class EndTraining(ScoredChange[None], frozen=True):
    """The trainer of this registration takes no more batches; where another registered since, it changes nothing."""

    name = "desk_end"

    uuid: str

    def plan(self, state: State, now: float) -> Plan:
        scored = state.scored
        mine = next(reversed(scored.uuids), None) == self.uuid
        return Plan([facts.TrainerEnded("", now)] if mine and not scored.training_ended else [])


def desk_end(uuid: int) -> EndTraining:
    """The trainer takes no more batches: environments are told so, and finish; others wait for the next trainer. `uuid`
    is that of its registration: where another trainer registered since, this changes nothing."""
    return EndTraining(f"{check_count(uuid, 'uuid', 0, 2**128 - 1):032x}")


class ServeFromChannel(ScoredChange[None], frozen=True):
    """Lets the scored groups and a channel serve from each other, where either has too few; None ends it."""

    name = "desk_serve"
    any_channel = True

    channel: str | None

    def plan(self, state: State, now: float) -> Plan:
        same = self.channel == state.scored.serving
        return Plan([] if same else [facts.ChannelServed(self.channel or "", now)])


class ResetScoredGroups(ScoredChange[None], frozen=True):
    """Forgets trainer, environments, groups and step."""

    name = "desk_reset"

    def plan(self, state: State, now: float) -> Plan:
        return Plan([facts.ScoredReset("", now)])


class ReadScoredInfo(ScoredRead[ScoredInfo], frozen=True):
    """What the trainer registered with, and whether it has started."""

    name = "desk_info"

    def read(self, state: State, now: float) -> ScoredInfo:
        scored = state.scored
        return ScoredInfo(
            *(scored.registration, scored.started, len(scored.environments), scored.serving),
            batch_size=scored.batch_size,
            ended=scored.training_ended,
            by_fetch=scored.by_fetch,
        )

    result = result_as(ScoredInfo)


class ReadScoredStatus(ScoredRead[ScoredStatus], frozen=True):
    """Batches handed out, and groups queued."""

    name = "desk_status"

    def read(self, state: State, now: float) -> ScoredStatus:
        scored = state.scored
        unmovable = scored.why_unmovable(*scored.unmovable)
        return ScoredStatus(scored.step, len(scored.batching), dict(scored.misfits), scored.misfit, unmovable)

    result = result_as(ScoredStatus)


# -- batches -----------------------------------------------------------------------------------------------------------


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
        scored, registration = state.scored, state.scored.registration
        if registration is None:
            raise NotRegistered("no trainer is registered; register first")
        deadline = now + lease_seconds(self.lease_s)
        if self.request_id and self.request_id in scored.requests:
            return Plan(reply=_handed_out(scored, scored.requests[self.request_id]))
        size = scored.batch_size or registration.batch_size
        picked = scored.batching.pick(size)
        if picked is None and scored.serving is not None:
            brought = from_channel(state, state.channel(scored.serving), size, now)
            if brought is not None:
                return brought
        if picked is None:
            return Plan([] if scored.started else [facts.TrainerStarted("", now)])
        lease = f"desk-{scored.next_lease}"
        fact = facts.BatchHandedOut("", now, tuple(picked), lease, deadline, self.request_id)
        return Plan([fact], after=lambda: _handed_out(scored, scored.leases[lease]))

    result = result_as(ScoredBatch)


def _handed_out(scored: ScoredGroups, lease: BatchLease) -> ScoredBatch:
    pieces = [scored.pieces.piece(number) for number in lease.groups]
    return ScoredBatch(lease.id, pieces, scored.step, not scored.repeated.isdisjoint(lease.groups))


class AckScoredBatch(ScoredChange[None], frozen=True):
    """The batch arrived: its groups are gone for good. `LeaseLost` where its lease ended otherwise; again is fine."""

    name = "desk_ack"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        if state.scored.ended.get(self.lease_id) == "acked":
            return Plan()
        return Plan([facts.BatchAcked("", now, _lease(state.scored, self.lease_id).id)])


class NackScoredBatch(ScoredChange[None], frozen=True):
    """The batch did not arrive: its groups go out again, and it does not count as a step. `LeaseLost` where its lease
    ended otherwise; again is fine."""

    name = "desk_nack"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        if state.scored.ended.get(self.lease_id) == "returned":
            return Plan()
        return Plan([facts.BatchReturned("", now, _lease(state.scored, self.lease_id).id, "nack")])


def _lease(scored: ScoredGroups, lease: str) -> BatchLease:
    found = scored.leases.get(lease)
    if found is None:
        raise LeaseLost(f"no lease {lease!r} of a batch: it expired or was ended; its groups may have gone out again")
    return found


class ConfirmScoredBatch(ScoredChange[None], frozen=True):
    """The trainer has this batch, whatever became of its lease: what still waits of it does not go out again. A lease
    that is not known any more changes nothing."""

    name = "desk_received"

    lease_id: str

    def plan(self, state: State, now: float) -> Plan:
        if self.lease_id in state.scored.leases:
            return Plan([facts.BatchAcked("", now, self.lease_id)])
        known = self.lease_id in state.scored.returned
        return Plan([facts.BatchReceived("", now, self.lease_id)] if known else [])


class ReleaseScoredBatches(ScoredChange[None], frozen=True):
    """Every batch that is out goes back at once: for an API that was started anew and is the pool's only one."""

    name = "desk_release"

    def plan(self, state: State, now: float) -> Plan:
        return Plan([facts.BatchReturned("", now, lease, "released") for lease in state.scored.leases])
