"""The operations of a pool by name: what an embedded pool carries out and what a remote one may ask for.

Each takes the core, the time, the arguments and the steps of a call, and returns a plan, or, where it only reads, the
answer. What came from another process has been checked against `arguments` by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.data.block import Block
from headrace.data.errors import InvalidInput
from headrace.data.step import check_uid
from headrace.pool import queries
from headrace.pool.core import Core
from headrace.pool.desk import operations as desk
from headrace.pool.plan import Plan

Operation = Callable[[Core, float, dict[str, Any], Block | None], Any]


def _submit(core: Core, now: float, a: dict[str, Any], block: Block | None) -> Plan:
    if block is None:
        raise InvalidInput("a submit needs steps")
    return core.submit(a["channel"], block, now)


def _fetch(core: Core, now: float, a: dict[str, Any], _: Block | None) -> Plan:
    return core.fetch(
        a["channel"],
        a["batch_size"],
        now,
        n_rollouts=a["n_rollouts"],
        order_=a["order"],
        max_staleness=a["max_staleness"],
        lease_s=a["lease_s"],
        request=a["request_id"],
        unit=a["unit"],
    )


#: Operations that change something, as plans.
PLANS: dict[str, Operation] = {
    "submit": _submit,
    "fetch": _fetch,
    "open": lambda c, now, a, _: c.open(
        a["channel"],
        a["trajectory_uid"],
        a["prompt_uid"],
        a["metadata"],
        a["n_rollouts"],
        now,
        move=a.get("move", False),
        keep=a.get("keep", False),
    ),
    "reward": lambda c, now, a, _: c.reward(a["channel"], a["trajectory_uid"], a["reward"], a["step_index"], now),
    "complete": lambda c, now, a, _: c.complete(a["channel"], a["trajectory_uid"], a["reward"], now),
    "ack": lambda c, now, a, _: c.ack(a["channel"], a["lease_id"], now),
    "nack": lambda c, now, a, _: c.nack(a["channel"], a["lease_id"], now),
    "extend": lambda c, now, a, _: c.extend(a["channel"], a["lease_id"], a["lease_s"], now),
    "configure": lambda c, now, a, _: c.configure(a["channel"], a["options"], now),
    "set_version": lambda c, now, a, _: c.set_version(a["version"], a["channel"], now),
    "shutdown": lambda c, now, a, _: c.set_closed(True, a["channel"], now),
    "reopen": lambda c, now, a, _: c.set_closed(False, a["channel"], now),
    "curate": lambda c, now, a, _: c.curate(a["channel"], a["trajectory_uid"], a["step_index"], a["changes"], now),
    "forget": lambda c, now, a, _: c.forget(a["trajectory_uid"], a["channel"], now),
    **desk.PLANS,
}

MAX_CHANNEL = 200  # characters; a lease's id is its channel's name and a number

#: Operations on one channel, which must be named; the others find what they need in any, or mean all.
NEEDS_CHANNEL = frozenset(
    ("submit", "fetch", "open", "ack", "nack", "extend", "configure", "list_groups", "list_trajectories", "list_steps")
)

#: Operations that only read.
READS: dict[str, Operation] = {
    "trajectory": lambda c, now, a, _: queries.trajectory(c.state, a["trajectory_uid"], a["channel"]),
    "stats": lambda c, now, a, _: queries.stats(c.state, a["channel"]),
    "events": lambda c, now, a, _: queries.events(c.state, a["cursor"], a["limit"]),
    "list_groups": lambda c, now, a, _: queries.list_groups(c.state, a["channel"], a["filters"]),
    "list_trajectories": lambda c, now, a, _: queries.list_trajectories(c.state, a["channel"], a["filters"]),
    "list_steps": lambda c, now, a, _: queries.list_steps(c.state, a["channel"], a["filters"]),
    **desk.READS,
}

#: Operations at the desk: no channel is theirs.
AT_DESK = frozenset((*desk.PLANS, *desk.READS))


def check(op: str, args: dict[str, Any]) -> None:
    """Names are strings before anything is looked up, or written down, by them."""
    if args.get("channel") is not None or op in NEEDS_CHANNEL:
        check_uid(args.get("channel"), "channel", MAX_CHANNEL)
    for name in ("trajectory_uid", "lease_id"):
        if name in args:
            check_uid(args[name], name)
    if args.get("request_id"):
        check_uid(args["request_id"], "request_id")


def run(core: Core, op: str, now: float, args: dict[str, Any], block: Block | None) -> Any:
    operation = PLANS.get(op) or READS.get(op)
    if operation is None:
        raise InvalidInput(f"no operation {op!r}; known: {', '.join([*PLANS, *READS])}")
    return operation(core, now, args, block)
