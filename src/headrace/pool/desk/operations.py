"""The desk's operations by name, as `headrace.pool.operations` has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.data.block import Block
from headrace.pool.core import Core
from headrace.pool.scored import plans

Operation = Callable[[Core, float, dict[str, Any], Block | None], Any]

PLANS: dict[str, Operation] = {
    "desk_register": lambda c, now, a, _: plans.register(
        c.state, now, a["registration"], a["uuid"], resume=a["resume"]
    ),
    "desk_register_env": lambda c, now, a, _: plans.register_env(c.state, now, a["environment"], a["request_id"]),
    "desk_disconnect": lambda c, now, a, _: plans.disconnect(c.state, now, a["env_id"]),
    "desk_post": lambda c, now, a, _: plans.post(c.state, now, a["postings"], a["request_id"]),
    "desk_forget": lambda c, now, a, _: plans.forget(c.state, now, a["keys"]),
    "desk_batch": lambda c, now, a, _: plans.batch(c.state, now, a["request_id"], a["lease_s"]),
    "desk_ack": lambda c, now, a, _: plans.ack(c.state, now, a["lease_id"]),
    "desk_nack": lambda c, now, a, _: plans.nack(c.state, now, a["lease_id"]),
    "desk_received": lambda c, now, a, _: plans.received(c.state, now, a["lease_id"]),
    "desk_release": lambda c, now, a, _: plans.release(c.state, now),
    "desk_serve": lambda c, now, a, _: plans.serve(c.state, now, a["channel"]),
    "desk_reset": lambda c, now, a, _: plans.reset(c.state, now),
}

READS: dict[str, Operation] = {
    "desk_info": lambda c, now, a, _: plans.info(c.state),
    "desk_status": lambda c, now, a, _: plans.status(c.state),
    "desk_env_status": lambda c, now, a, _: plans.env_status(c.state, now, a["env_id"], a["heartbeat_s"]),
    "desk_latest": lambda c, now, a, _: plans.latest(c.state),
}
