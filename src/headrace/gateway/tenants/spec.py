"""What a `--tenants` file says: whose keys open what, and how much of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace import files
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import check_uid
from headrace.gateway.tables import fitted
from headrace.pool.config import DEFAULT_CHANNEL

#: What stands between a tenant's name and the uids that its keys name.
SLASH = "/"
#: A key that begins so is in the environment variable of the name behind it.
FROM_ENVIRONMENT = "env:"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    keys            its agents' keys; `env:NAME` is the value of a variable
    reward_keys     its keys for rewards and completions; without any, its agents' open those too, unless --reward-key
    channels        where its trajectories may go; the first is for those that name none
    calls_per_s     requests a second, of any kind; `burst` at once after a pause, otherwise a second's worth
    tokens_per_s    tokens a second, consumed and sampled, counted when a call has ended; a minute's may be saved up
    concurrency     requests under way at once
    max_body_mb     its largest request
    """

    keys: list[str]
    reward_keys: list[str] = []
    channels: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_CHANNEL])
    calls_per_s: Positive | None = None
    burst: Count | None = None
    tokens_per_s: Positive | None = None
    concurrency: Count | None = None
    max_body_mb: Positive | None = None


class _Top(msgspec.Struct):
    tenants: dict[str, Any]


def read_tenants(path: Path) -> dict[str, TenantSpec]:
    """The tenants of a file by name, their keys in place; an error names the file, the tenant and the key."""
    top = fitted(files.read(path), _Top, str(path))
    found: dict[str, TenantSpec] = {}
    taken: dict[str, str] = {}
    for name, given in top.tenants.items():
        where = f"{path}: tenants.{name}"
        spec = fitted(given, TenantSpec, where)
        try:
            found[name] = _settled(name, spec)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        for key in (*found[name].keys, *found[name].reward_keys):
            other = taken.setdefault(key, name)
            if other != name or (found[name].keys + found[name].reward_keys).count(key) > 1:
                raise InvalidInput(f"{where}: one of its keys stands twice, the other time under {other!r}")
    return found


def _settled(name: str, spec: TenantSpec) -> TenantSpec:
    check_uid(name, "the name")
    if SLASH in name:
        raise InvalidInput(f"the name holds a {SLASH!r}, which ends it where its uids begin; choose another")
    if not spec.keys:
        raise InvalidInput("keys is empty; a tenant without a key can do nothing")
    if not spec.channels:
        raise InvalidInput("channels is empty; name those that its trajectories may go to, the usual one first")
    for channel in spec.channels:
        check_uid(channel, "channels")
    if spec.burst is not None and spec.calls_per_s is None:
        raise InvalidInput("burst says how much of calls_per_s may be saved up; give that too")
    keys, reward_keys = ([_key(key) for key in given] for given in (spec.keys, spec.reward_keys))
    return msgspec.structs.replace(spec, keys=keys, reward_keys=reward_keys)


def _key(given: str) -> str:
    if not given.startswith(FROM_ENVIRONMENT):
        found = given
    else:
        variable = given.removeprefix(FROM_ENVIRONMENT)
        found = os.environ.get(variable, "")
        if not found:
            raise InvalidInput(f"a key is {shown(given)}, and {variable} is not set in the environment")
    if not found:
        raise InvalidInput("a key is empty")
    return found
