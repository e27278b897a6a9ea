"""The arguments of every operation, typed: what a call from another process is checked against before it is run."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.errors import InvalidInput
from headrace.pool.desk import arguments as desk

Number = int | float


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    pass


class OnChannel(Arguments):
    channel: str


class OnAnyChannel(Arguments):
    channel: str | None = None


class Submit(OnChannel):
    timeout: Number | None = None
    pieces: bool = False


class Fetch(OnChannel):
    batch_size: int
    n_rollouts: int | None
    order: str
    max_staleness: int | None
    lease_s: Number | None
    timeout: Number | None
    request_id: str
    unit: str
    pieces: bool = False


class Open(OnChannel):
    trajectory_uid: str
    prompt_uid: str | None
    metadata: dict[str, Any] | None
    n_rollouts: int | None
    move: bool = False
    keep: bool = False


class Reward(OnAnyChannel, kw_only=True):
    trajectory_uid: str
    reward: Number
    step_index: int | None


class Complete(OnAnyChannel, kw_only=True):
    trajectory_uid: str
    reward: Number | None


class Leased(OnChannel):
    lease_id: str


class Extend(Leased):
    lease_s: Number


class Configure(OnChannel):
    options: dict[str, Any]


class SetVersion(OnAnyChannel, kw_only=True):
    version: int


class Curate(OnAnyChannel, kw_only=True):
    trajectory_uid: str
    step_index: int
    changes: dict[str, Any]


class OnTrajectory(OnAnyChannel, kw_only=True):
    trajectory_uid: str


class Forget(OnTrajectory, kw_only=True):
    erase: bool = True


class Events(Arguments):
    cursor: int
    limit: int


class Listing(OnChannel):
    filters: dict[str, Any]


class Backup(Arguments):
    to: str


BY_OPERATION: dict[str, type[msgspec.Struct]] = {
    "submit": Submit,
    "fetch": Fetch,
    "open": Open,
    "reward": Reward,
    "complete": Complete,
    "ack": Leased,
    "nack": Leased,
    "extend": Extend,
    "configure": Configure,
    "set_version": SetVersion,
    "shutdown": OnAnyChannel,
    "reopen": OnAnyChannel,
    "curate": Curate,
    "forget": Forget,
    "trajectory": OnTrajectory,
    "stats": OnAnyChannel,
    "events": Events,
    "list_groups": Listing,
    "list_trajectories": Listing,
    "list_steps": Listing,
    "compact": Arguments,
    "backup": Backup,
    **desk.BY_OPERATION,
}


def checked(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """All of an operation's arguments, those that were left out by their defaults. `InvalidInput` where the operation
    is unknown, or an argument is missing, unknown or of another type."""
    expected = BY_OPERATION.get(op)
    if expected is None:
        raise InvalidInput(f"no operation {op!r}; known: {', '.join(BY_OPERATION)}")
    try:
        return msgspec.structs.asdict(msgspec.convert(args, expected))
    except msgspec.ValidationError as error:
        raise InvalidInput(f"operation {op!r}: {error}") from None
