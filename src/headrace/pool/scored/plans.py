"""Every call about scored groups as a plan over the pool's state. Making one changes nothing that a journal must have.

What it may change at once: when an environment was heard from, how many posts were duplicates, and which bytes were put
into a scratch file ahead of the fact that takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop
from typing import Any

import msgspec

from headrace.data.block import Block
from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.data.step import check_finite, check_uid
from headrace.pool.errors import LeaseLost, NotFound, NotRegistered
from headrace.pool.operation import Plan
from headrace.pool.scored import facts
from headrace.pool.scored.groups import BatchLease, ScoredGroups, key_of
from headrace.pool.scored.piece_store import load
from headrace.pool.scored.transfer import from_channel
from headrace.pool.scored.types import (
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    ScoredBatch,
    ScoredEnvStatus,
    ScoredInfo,
    ScoredStatus,
    check_posting,
    checked,
)
from headrace.pool.state import State


def due(state: State, now: float) -> Iterator[facts.ScoredFact]:
    """Facts that the clock, or groups that can never be served, call for; each is applied before the next one."""
    scored = state.scored
    while scored.deadlines and scored.deadlines[0][0] <= now:
        lease = scored.leases.get(scored.deadlines[0][1])
        if lease is None:
            heappop(scored.deadlines)
        else:
            yield facts.BatchReturned("", now, lease.id, "expired")
    while unservable := scored.unservable():
        why = next(iter(unservable.values()))
        numbers = tuple(number for number, found in unservable.items() if found == why)
        yield facts.GroupsDropped("", now, numbers, why.kind, why.reason)


# -- trainers ----------------------------------------------------------------------------------------------------------


def register(state: State, now: float, given: Any, uuid: str, *, resume: bool) -> Plan:
    """Takes a trainer in. Settings that hold stay, with a warning, unless `resume` brings others."""
    registration = checked(given, Registration, "registration")
    check_uid(uuid, "uuid")
    scored, current = state.scored, state.scored.registration
    if uuid in scored.uuids and current is not None:
        return Plan(reply=_warning(registration, current))
    if current is None:
        return Plan([facts.TrainerRegistered("", now, uuid, registration, registration.starting_step)])
    if resume and registration != current:
        step = registration.starting_step if registration.starting_step != current.starting_step else None
        return Plan([facts.TrainerRegistered("", now, uuid, registration, step)])
    return Plan([facts.TrainerRegistered("", now, uuid)], reply=_warning(registration, current))


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


def batch(state: State, now: float, request: str, lease_s: Any) -> Plan:
    """The next batch, out under a lease; a reply of None where none is ready."""
    scored, registration = state.scored, state.scored.registration
    if registration is None:
        raise NotRegistered("no trainer is registered; register first")
    deadline = now + _lease_seconds(lease_s)
    if request and request in scored.requests:
        return Plan(reply=_handed_out(scored, scored.requests[request]))
    picked = scored.batching.pick(registration.batch_size)
    if picked is None and scored.serving is not None:
        brought = from_channel(state, state.channel(scored.serving), registration.batch_size, now)
        if brought is not None:
            return brought
    if picked is None:
        return Plan([] if scored.started else [facts.TrainerStarted("", now)])
    lease = f"desk-{scored.next_lease}"
    fact = facts.BatchHandedOut("", now, tuple(picked), lease, deadline, request)
    return Plan([fact], after=lambda: _handed_out(scored, scored.leases[lease]))


def _handed_out(scored: ScoredGroups, lease: BatchLease) -> ScoredBatch:
    pieces = [scored.pieces.piece(number) for number in lease.groups]
    return ScoredBatch(lease.id, pieces, scored.step, not scored.repeated.isdisjoint(lease.groups))


def _lease_seconds(lease_s: Any) -> float:
    seconds = check_finite(lease_s, "lease_s")
    if not 0 < seconds < 1e9:
        raise InvalidInput(f"lease_s must be a number of seconds above 0, not {shown(lease_s)}")
    return seconds


def ack(state: State, now: float, lease: str) -> Plan:
    """The batch arrived. `LeaseLost` where its lease ended otherwise; again is fine."""
    if state.scored.ended.get(lease) == "acked":
        return Plan()
    return Plan([facts.BatchAcked("", now, _lease(state.scored, lease).id)])


def nack(state: State, now: float, lease: str) -> Plan:
    """The batch did not arrive. `LeaseLost` where its lease ended otherwise; again is fine."""
    if state.scored.ended.get(lease) == "returned":
        return Plan()
    return Plan([facts.BatchReturned("", now, _lease(state.scored, lease).id, "nack")])


def received(state: State, now: float, lease: str) -> Plan:
    """The trainer names the last batch that it has. One that is not known any more changes nothing."""
    scored = state.scored
    if lease in scored.leases:
        return Plan([facts.BatchAcked("", now, lease)])
    return Plan([facts.BatchReceived("", now, lease)] if lease in scored.returned else [])


def release(state: State, now: float) -> Plan:
    """Every batch that is out goes back: whoever was handing them over is gone."""
    return Plan([facts.BatchReturned("", now, lease, "released") for lease in state.scored.leases])


def _lease(scored: ScoredGroups, lease: str) -> BatchLease:
    found = scored.leases.get(lease)
    if found is None:
        raise LeaseLost(f"no lease {lease!r} of a batch: it expired or was ended; its groups may have gone out again")
    return found


# -- environments ------------------------------------------------------------------------------------------------------


def register_env(state: State, now: float, given: Any, request: str) -> Plan:
    """Takes an environment in; a reply of None until the trainer has asked for its first batch."""
    registration = checked(given, EnvRegistration, "environment")
    scored = state.scored
    if not scored.started or scored.registration is None:
        return Plan()
    if request and request in scored.joined:
        env = scored.joined[request]
        return Plan(reply=_env_registered(scored, scored.registration, env, *scored.environments[env]))
    env = max(scored.environments, default=-1) + 1
    name = f"{registration.desired_name}_{scored.names[registration.desired_name]}"
    answer = _env_registered(scored, scored.registration, env, registration, name)
    return Plan([facts.EnvJoined("", now, env, registration, name, request)], reply=answer)


def _env_registered(
    scored: ScoredGroups, registration: Registration, env: int, environment: EnvRegistration, name: str
) -> EnvRegistered:
    size, batch_size = environment.group_size, registration.batch_size
    fits = scored.batching.may_fit(size, batch_size)
    return EnvRegistered(
        env,
        name,
        registration.checkpoint_dir,
        scored.step,
        registration.save_checkpoint_interval,
        registration.num_steps,
        "" if fits else f"no groups make up its {size} sequences to batch_size {batch_size}",
    )


def disconnect(state: State, now: float, env: Any) -> Plan:
    """An environment ends; `NotFound` where none has this id."""
    return Plan([facts.EnvLeft("", now, _environment(state.scored, env))])


def _environment(scored: ScoredGroups, env: Any) -> int:
    if isinstance(env, bool) or not isinstance(env, int) or env not in scored.environments:
        raise NotFound(f"no environment {shown(env)} is registered; there are {len(scored.environments)}")
    return env


# -- posting -----------------------------------------------------------------------------------------------------------


def post(state: State, now: float, given: Any, request: str) -> Plan:
    """Takes all the groups, or none. `request` tells groups without a key apart from those of another call."""
    scored = state.scored
    postings = [one if type(one) is Posting else _converted(one, at) for at, one in enumerate(given)]
    _check_size(state, postings)
    answers: list[int | Posted] = []  # for each posting: its place among the new ones, or the answer that it had
    fresh: dict[str, int] = {}  # keys of the new ones
    taken: list[tuple[facts.PostedGroup, Piece]] = []
    for at, posting in enumerate(postings):
        key = posting.key or (f"{request}/{at}" if request else "")
        if key:
            known = scored.seen(posting.env_id, key) or fresh.get(key_of(posting.env_id, key))
            if known is not None:
                answers.append(known)
                continue
            fresh[key_of(posting.env_id, key)] = len(taken)
        answers.append(len(taken))
        piece = posting.piece
        number = scored.next_number + len(taken)
        taken.append((facts.PostedGroup(number, piece.size, piece.crc, posting.sequences, posting.env_id, key), piece))
    scored.duplicates += len(postings) - len(taken)
    if not taken:
        for posting in postings:
            scored.hear(posting.env_id, now)
        return Plan(reply=answers)
    scored.pieces.stage([(entry.number, piece) for entry, piece in taken])
    block = Block([], b"", b"", {facts.blob_name(entry.number): piece.data for entry, piece in taken})
    fact = facts.GroupsPosted("", now, tuple(entry for entry, _ in taken))
    return Plan([fact], block, after=lambda: _posted(scored, answers, taken[0][0].number))


def forget(state: State, now: float, given: Any) -> Plan:
    """Forgets keys, where they are known."""
    keys = checked(given, list[tuple[int | None, str]], "keys")
    known = tuple((env, key) for env, key in keys if state.scored.seen(env, key) is not None)
    return Plan([facts.KeysForgotten("", now, known)] if known else [])


def _posted(scored: ScoredGroups, answers: list[int | Posted], first: int) -> list[Posted]:
    """The answer to each posting, once the new ones were taken in as the groups from the number `first` on."""
    unservable = scored.unservable()
    found: list[Posted] = []
    given: set[int] = set()
    for one in answers:
        if isinstance(one, Posted):
            found.append(one)
        else:
            why = unservable.get(first + one)
            misfit = why.reason if why is not None else ""
            found.append(msgspec.structs.replace(scored.answers[one], duplicate=one in given, misfit=misfit))
            given.add(one)
    return found


def _converted(one: Any, at: int) -> Posting:
    """A group that comes from another process."""
    try:
        posting = msgspec.convert(one, Posting)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"group {at}: {error}") from None
    check_posting(posting, at)
    return posting


def _check_size(state: State, postings: list[Posting]) -> None:
    size, most = sum(len(posting.piece.data) for posting in postings), state.limits.max_submit_mb
    if size > most * 1e6:
        raise InvalidInput(f"groups of {size / 1e6:.1f} MB at once; at most {most} MB are taken: send them in parts")


# -- control and reading -----------------------------------------------------------------------------------------------


def reset(state: State, now: float) -> Plan:
    """Forgets trainer, environments, groups and step."""
    return Plan([facts.ScoredReset("", now)])


def serve(state: State, now: float, channel: str | None) -> Plan:
    """Lets scored groups and a channel serve from each other; None ends it."""
    return Plan([facts.ChannelServed(channel or "", now)] if channel != state.scored.serving else [])


def info(state: State) -> ScoredInfo:
    scored = state.scored
    return ScoredInfo(scored.registration, scored.started, len(scored.environments), scored.serving)


def status(state: State) -> ScoredStatus:
    scored = state.scored
    return ScoredStatus(scored.step, len(scored.batching), dict(scored.misfits), scored.misfit)


def env_status(state: State, now: float, env: Any, heartbeat_s: float | None) -> ScoredEnvStatus:
    """The numbers for one environment. Asking is a sign of life; who gave none for `heartbeat_s` has no weight."""
    scored = state.scored
    env = _environment(scored, env)
    scored.hear(env, now)
    if heartbeat_s is not None:
        scored.silence(now - check_finite(heartbeat_s, "heartbeat_s"))
    batch_size = scored.registration.batch_size if scored.registration is not None else 1
    unservable = scored.unservable_sequences.get(env, 0)
    found = scored.batching.status(env, batch_size, unservable)
    return ScoredEnvStatus(
        scored.step,
        found.queue_size,
        found.env_weight,
        found.unallocated_fraction,
        found.self_queue_size,
        found.max_group_size,
        scored.misfit if unservable else "",
    )


def latest(state: State) -> Piece | None:
    """The group that entered the queue last, also once it is gone."""
    held = state.scored.latest
    return None if held is None else load(held)
