"""The arguments of the desk's operations, typed. What they hold is checked where it is planned."""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Register(Arguments):
    registration: dict[str, Any]
    uuid: str
    resume: bool


class RegisterEnv(Arguments):
    environment: dict[str, Any]
    request_id: str


class OnEnv(Arguments):
    env_id: int


class Post(Arguments):
    postings: list[dict[str, Any]]
    request_id: str


class Forget(Arguments):
    keys: list[Any]


class Take(Arguments):
    request_id: str
    lease_s: Number


class Leased(Arguments):
    lease_id: str


class Serve(Arguments):
    channel: str | None


class EnvStatus(OnEnv):
    heartbeat_s: Number | None


BY_OPERATION: dict[str, type[Arguments]] = {
    "desk_register": Register,
    "desk_register_env": RegisterEnv,
    "desk_disconnect": OnEnv,
    "desk_post": Post,
    "desk_forget": Forget,
    "desk_batch": Take,
    "desk_ack": Leased,
    "desk_nack": Leased,
    "desk_received": Leased,
    "desk_release": Arguments,
    "desk_serve": Serve,
    "desk_reset": Arguments,
    "desk_info": Arguments,
    "desk_status": Arguments,
    "desk_env_status": EnvStatus,
    "desk_latest": Arguments,
}
