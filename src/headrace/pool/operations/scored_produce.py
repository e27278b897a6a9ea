"""Operations of environments on scored groups: they register, post groups, and ask how long the queue is.

Making a plan changes nothing that a journal must have. What it may change at once: when an environment was heard from,
how many posts were duplicates, and which bytes were put into a scratch file ahead of the fact that takes them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.block import Block
from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.data.step import check_finite
from headrace.pool.errors import NotFound
from headrace.pool.operation import Plan, ScoredChange, ScoredRead, result_as
from headrace.pool.scored import facts
from headrace.pool.scored.groups import ScoredGroups, key_of
from headrace.pool.scored.piece_store import load
from headrace.pool.scored.types import (
    EnvRegistered,
    EnvRegistration,
    Posted,
    Posting,
    Registration,
    ScoredEnvStatus,
    check_posting,
    checked,
)
from headrace.pool.scored.types import read as as_record
from headrace.pool.state import State

# -- environments ------------------------------------------------------------------------------------------------------


class RegisterEnvironment(ScoredChange[EnvRegistered | None], frozen=True):
    """Takes an environment in; the same `request_id` again is the same environment."""

    name = "desk_register_env"

    environment: Any
    request_id: str

    def plan(self, state: State, now: float) -> Plan:
        given = checked(self.environment, EnvRegistration, "environment")
        scored, request = state.scored, self.request_id
        if not scored.started or scored.registration is None:
            return Plan()
        if request and request in scored.joined:
            env = scored.joined[request]
            return Plan(reply=_env_registered(scored, scored.registration, env, *scored.environments[env]))
        env = max(scored.environments, default=-1) + 1
        name = f"{given.desired_name}_{scored.names[given.desired_name]}"
        answer = _env_registered(scored, scored.registration, env, given, name)
        return Plan([facts.EnvJoined("", now, env, given, name, request)], reply=answer)

    result = result_as(EnvRegistered)


def desk_register_env(environment: EnvRegistration, request_id: str = "") -> RegisterEnvironment:
    """Takes an environment in; None until the trainer has asked for its first batch."""
    return RegisterEnvironment(checked(environment, EnvRegistration, "environment"), request_id)


def _env_registered(
    scored: ScoredGroups, registration: Registration, env: int, environment: EnvRegistration, name: str
) -> EnvRegistered:
    size, batch_size = environment.group_size, scored.exact_size
    fits = batch_size is None or scored.batching.may_fit(size, batch_size)
    return EnvRegistered(
        env,
        name,
        registration.checkpoint_dir,
        scored.step,
        registration.save_checkpoint_interval,
        registration.num_steps,
        "" if fits else f"no groups make up its {size} sequences to batch_size {batch_size}",
    )


class DisconnectEnvironment(ScoredChange[None], frozen=True):
    """The environment counts no longer towards weights and shares; its groups stay. `NotFound` if unknown."""

    name = "desk_disconnect"

    env_id: int

    def plan(self, state: State, now: float) -> Plan:
        return Plan([facts.EnvLeft("", now, _environment(state.scored, self.env_id))])


class ReadEnvironmentStatus(ScoredRead[ScoredEnvStatus], frozen=True):
    """How long the queue is for one environment, and its weight among those that called within `heartbeat_s`; asking
    counts as a call. `NotFound` if unknown."""

    name = "desk_env_status"

    env_id: int
    heartbeat_s: float | None = None

    def read(self, state: State, now: float) -> ScoredEnvStatus:
        scored = state.scored
        env = _environment(scored, self.env_id)
        scored.hear(env, now)
        if self.heartbeat_s is not None:
            scored.silence(now - check_finite(self.heartbeat_s, "heartbeat_s"))
        held = scored.registration
        batch_size = scored.batch_size or 1
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
            ended=scored.training_ended,
            num_steps=held.num_steps if held is not None else -1,
            unmovable=scored.why_unmovable(env),
        )

    result = result_as(ScoredEnvStatus)


def _environment(scored: ScoredGroups, env: Any) -> int:
    if isinstance(env, bool) or not isinstance(env, int) or env not in scored.environments:
        raise NotFound(f"no environment {shown(env)} is registered; there are {len(scored.environments)}")
    return env


# -- groups ------------------------------------------------------------------------------------------------------------


class PostScoredGroups(ScoredChange[list[Posted]], frozen=True):
    """Takes all of the scored groups, or none. `request_id` tells groups without a key apart from those of another
    call."""

    name = "desk_post"

    postings: list[Any]
    request_id: str

    def plan(self, state: State, now: float) -> Plan:
        scored = state.scored
        postings = [one if type(one) is Posting else _converted(one, at) for at, one in enumerate(self.postings)]
        _check_size(state, postings)
        answers: list[int | Posted] = []  # for each posting: its place among the new ones, or the answer that it had
        fresh: dict[str, int] = {}  # keys of the new ones
        taken: list[tuple[facts.PostedGroup, Piece]] = []
        for at, posting in enumerate(postings):
            env, piece = posting.env_id, posting.piece
            key = posting.key or (f"{self.request_id}/{at}" if self.request_id else "")
            if key:
                known = scored.seen(env, key) or fresh.get(key_of(env, key))
                if known is not None:
                    answers.append(known)
                    continue
                fresh[key_of(env, key)] = len(taken)
            answers.append(len(taken))
            number = scored.next_number + len(taken)
            taken.append((facts.PostedGroup(number, piece.size, piece.crc, posting.sequences, env, key), piece))
        scored.duplicates += len(postings) - len(taken)
        if not taken:
            for posting in postings:
                scored.hear(posting.env_id, now)
            return Plan(reply=answers)
        scored.pieces.stage([(entry.number, piece) for entry, piece in taken])
        block = Block([], b"", b"", {facts.blob_name(entry.number): piece.data for entry, piece in taken})
        fact = facts.GroupsPosted("", now, tuple(entry for entry, _ in taken))
        return Plan([fact], block, after=lambda: _posted(scored, answers, taken[0][0].number))

    def result(self, caller: Any, answer: list[Any]) -> list[Posted]:
        return [as_record(one, Posted) for one in answer]


def desk_post(postings: list[Posting], request_id: str = "") -> PostScoredGroups:
    """Takes all of the scored groups, or none. A `key` that its environment used before queues nothing."""
    if not isinstance(postings, list):
        raise InvalidInput(f"postings must be a list, not {shown(postings)}")
    for at, posting in enumerate(postings):
        check_posting(posting, at)
    return PostScoredGroups(postings, request_id)


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


class ForgetKeys(ScoredChange[None], frozen=True):
    """Forgets keys of posted groups, as pairs of an environment and a key, where they are known."""

    name = "desk_forget"

    keys: list[Any]

    def plan(self, state: State, now: float) -> Plan:
        keys = checked(self.keys, list[tuple[int | None, str]], "keys")
        known = tuple((env, key) for env, key in keys if state.scored.seen(env, key) is not None)
        return Plan([facts.KeysForgotten("", now, known)] if known else [])


def desk_forget(keys: list[tuple[int | None, str]]) -> ForgetKeys:
    """Forgets keys, each with its environment: the answers to the groups under them have arrived."""
    return ForgetKeys([list(key) for key in keys])


class ReadLatestGroup(ScoredRead[Piece | None], frozen=True):
    """The group that entered the queue last, also once it is gone."""

    name = "desk_latest"

    def read(self, state: State, now: float) -> Piece | None:
        held = state.scored.latest
        return None if held is None else load(held)

    result = result_as(Piece)
