"""The desk's calls as plans over a pool's state. They read; only facts change anything."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.piece import Piece
from headrace.data.step import check_uid, finite
from headrace.pool.desk import facts as f
from headrace.pool.desk.desk import Desk, Lease
from headrace.pool.desk.serve import to_desk
from headrace.pool.desk.shelf import whole
from headrace.pool.desk.types import (
    DeskBatch,
    DeskEnvStatus,
    DeskInfo,
    DeskStatus,
    EnvRegistered,
    EnvRegistration,
    Registration,
    checked,
)
from headrace.pool.errors import LeaseLost, NotFound, NotRegistered
from headrace.pool.operation import Plan
from headrace.pool.state import State


def due(state: State, now: float) -> Iterator[f.DeskFact]:
    """Facts that the clock, or groups that can never be served, call for; each is applied before the next one."""
    desk = state.desk
    while desk.deadlines and desk.deadlines[0][0] <= now:
        lease = desk.leases.get(desk.deadlines[0][1])
        if lease is None:
            heappop(desk.deadlines)
        else:
            yield f.Returned("", now, lease.id, "expired")
    while unservable := desk.unservable():
        why = next(iter(unservable.values()))
        numbers = tuple(number for number, found in unservable.items() if found == why)
        yield f.Dropped("", now, numbers, why.kind, why.reason)


# -- trainers ----------------------------------------------------------------------------------------------------------


def register(state: State, now: float, given: Any, uuid: str, *, resume: bool) -> Plan:
    """Takes a trainer in. Settings that hold stay, with a warning, unless `resume` brings others."""
    registration = checked(given, Registration, "registration")
    check_uid(uuid, "uuid")
    desk, current = state.desk, state.desk.registration
    if uuid in desk.uuids and current is not None:
        return Plan(reply=_warning(registration, current))
    if current is None:
        return Plan([f.Registered("", now, uuid, registration, registration.starting_step)])
    if resume and registration != current:
        step = registration.starting_step if registration.starting_step != current.starting_step else None
        return Plan([f.Registered("", now, uuid, registration, step)])
    return Plan([f.Registered("", now, uuid)], reply=_warning(registration, current))


def _warning(registration: Registration, current: Registration) -> str | None:
    if registration == current:
        return None
    other = [name for name in Registration.__struct_fields__ if getattr(registration, name) != getattr(current, name)]
    said = ", ".join(f"{name} stays {getattr(current, name)!r}" for name in other)
    return (
        f"a trainer registered before with other settings, which hold: {said}. "
        "Register with resume true to change them and keep the queue, or reset first"
    )


def batch(state: State, now: float, request: str, lease_s: Any) -> Plan:
    """The next batch, out under a lease; a reply of None where none is ready."""
    desk, registration = state.desk, state.desk.registration
    if registration is None:
        raise NotRegistered("no trainer is registered; register first")
    deadline = now + _seconds(lease_s)
    if request and request in desk.requests:
        return Plan(reply=_handed_out(desk, desk.requests[request]))
    picked = desk.batching.pick(registration.batch_size)
    if picked is None and desk.serving is not None:
        brought = to_desk(state, state.channel(desk.serving), registration.batch_size, now)
        if brought is not None:
            return brought
    if picked is None:
        return Plan([] if desk.started else [f.Started("", now)])
    lease = f"desk-{desk.next_lease}"
    fact = f.HandedOut("", now, tuple(picked), lease, deadline, request)
    return Plan([fact], after=lambda: _handed_out(desk, desk.leases[lease]))


def _handed_out(desk: Desk, lease: Lease) -> DeskBatch:
    pieces = [desk.shelf.piece(number) for number in lease.groups]
    return DeskBatch(lease.id, pieces, desk.step, not desk.repeated.isdisjoint(lease.groups))


def _seconds(lease_s: Any) -> float:
    seconds = finite(lease_s, "lease_s")
    if not 0 < seconds < 1e9:
        raise InvalidInput(f"lease_s must be a number of seconds above 0, not {shown(lease_s)}")
    return seconds


def ack(state: State, now: float, lease: str) -> Plan:
    if state.desk.ended.get(lease) == "acked":
        return Plan()
    return Plan([f.Acked("", now, _lease(state.desk, lease).id)])


def nack(state: State, now: float, lease: str) -> Plan:
    if state.desk.ended.get(lease) == "returned":
        return Plan()
    return Plan([f.Returned("", now, _lease(state.desk, lease).id, "nack")])


def received(state: State, now: float, lease: str) -> Plan:
    """The trainer names the last batch that it has. One that this desk does not know any more changes nothing."""
    desk = state.desk
    if lease in desk.leases:
        return Plan([f.Acked("", now, lease)])
    return Plan([f.Received("", now, lease)] if lease in desk.returned else [])


def release(state: State, now: float) -> Plan:
    """Every batch that is out goes back: whoever was handing them over is gone."""
    return Plan([f.Returned("", now, lease, "released") for lease in state.desk.leases])


def _lease(desk: Desk, lease: str) -> Lease:
    found = desk.leases.get(lease)
    if found is None:
        raise LeaseLost(f"no lease {lease!r} at the desk: it expired or was ended; its groups may have gone out again")
    return found


# -- environments ------------------------------------------------------------------------------------------------------


def register_env(state: State, now: float, given: Any, request: str) -> Plan:
    """Takes an environment in; a reply of None until the trainer has asked for its first batch."""
    registration = checked(given, EnvRegistration, "environment")
    desk = state.desk
    if not desk.started or desk.registration is None:
        return Plan()
    if request and request in desk.joined:
        env = desk.joined[request]
        return Plan(reply=_welcome(desk, desk.registration, env, *desk.environments[env]))
    env = max(desk.environments, default=-1) + 1
    name = f"{registration.desired_name}_{desk.names[registration.desired_name]}"
    welcome = _welcome(desk, desk.registration, env, registration, name)
    return Plan([f.Joined("", now, env, registration, name, request)], reply=welcome)


def _welcome(
    desk: Desk, registration: Registration, env: int, environment: EnvRegistration, name: str
) -> EnvRegistered:
    size, batch_size = environment.group_size, registration.batch_size
    fits = desk.batching.may_fit(size, batch_size)
    return EnvRegistered(
        env,
        name,
        registration.checkpoint_dir,
        desk.step,
        registration.save_checkpoint_interval,
        registration.num_steps,
        "" if fits else f"no groups make up its {size} sequences to batch_size {batch_size}",
    )


def disconnect(state: State, now: float, env: Any) -> Plan:
    return Plan([f.Left("", now, _environment(state.desk, env))])


def _environment(desk: Desk, env: Any) -> int:
    if isinstance(env, bool) or not isinstance(env, int) or env not in desk.environments:
        raise NotFound(f"no environment {shown(env)} is registered; there are {len(desk.environments)}")
    return env


# -- control and reading -----------------------------------------------------------------------------------------------


def reset(state: State, now: float) -> Plan:
    return Plan([f.Reset("", now)])


def serve(state: State, now: float, channel: str | None) -> Plan:
    return Plan([f.Serving(channel or "", now)] if channel != state.desk.serving else [])


def info(state: State) -> DeskInfo:
    desk = state.desk
    return DeskInfo(desk.registration, desk.started, len(desk.environments), desk.serving)


def status(state: State) -> DeskStatus:
    desk = state.desk
    return DeskStatus(desk.step, len(desk.batching), dict(desk.misfits), desk.misfit)


def env_status(state: State, now: float, env: Any, heartbeat_s: float | None) -> DeskEnvStatus:
    """The numbers for one environment. Asking is a sign of life; who gave none for `heartbeat_s` has no weight."""
    desk = state.desk
    env = _environment(desk, env)
    desk.hear(env, now)
    if heartbeat_s is not None:
        desk.silence(now - finite(heartbeat_s, "heartbeat_s"))
    batch_size = desk.registration.batch_size if desk.registration is not None else 1
    in_vain = desk.in_vain.get(env, 0)
    found = desk.batching.status(env, batch_size, in_vain)
    return DeskEnvStatus(
        desk.step,
        found.queue_size,
        found.env_weight,
        found.unallocated_fraction,
        found.self_queue_size,
        found.max_group_size,
        desk.misfit if in_vain else "",
    )


def latest(state: State) -> Piece | None:
    held = state.desk.latest
    return None if held is None else whole(held)
