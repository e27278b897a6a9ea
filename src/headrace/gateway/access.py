"""Who may do what. Three keys, each of which opens what the one before it opens; and those of tenants.

Agents call models; the reward key also rewards and ends trajectories; the admin key opens the rest. Where
any key is set, what only an admin may see is closed until there is an admin key: a ground truth is never readable with
an agent's. A tenant's keys open calls, or rewards, for its own trajectories and no others.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.data.errors import InvalidInput
from headrace.data.guidance import SCORED_GROUP
from headrace.data.step import REWARD_INFO, REWARD_SOURCE
from headrace.gateway.config_files import UID_SEPARATOR, read_tenants
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.tenants import Tenant
from headrace.gateway.usage import UsageTable
from headrace.net.server import presented_key
from headrace.pool.errors import Unauthorized

#: Room that nobody counts.
UNBOUNDED: AbstractContextManager[None] = nullcontext()


class Role(IntEnum):
    """What a key opens; each role opens what the one before it does."""

    AGENT = 0
    REWARD = 1
    ADMIN = 2


class Caller(msgspec.Struct, frozen=True, eq=False):
    """Who sent a request: what its key opens, and which tenant's it is.

    `trusted`: it is no agent's key. `reserved`: names under which tenants' uids are.
    """

    role: Role
    tenant: Tenant | None = None
    trusted: bool = False
    reserved: frozenset[str] = frozenset()

    def uid(self, given: str) -> str:
        """What the pool calls a trajectory or a prompt that the caller names."""
        if self.tenant is not None:
            return self.tenant.uid(given)
        if not self.trusted and UID_SEPARATOR in given and given.partition(UID_SEPARATOR)[0] in self.reserved:
            raise Refusal(f"{given!r} is a tenant's; this key does not open it", 403, code="not_yours")
        return given

    def channel(self, given: str | None, usual: str) -> str:
        """The channel that the caller asks for; the usual one where it asks for none."""
        return self.tenant.channel(given) if self.tenant is not None else given or usual

    @property
    def max_body_mb(self) -> float | None:
        """The largest request of the caller's tenant; None where only the gateway's bound holds."""
        return self.tenant.spec.max_body_mb if self.tenant is not None else None

    def admitted(self) -> AbstractContextManager[None]:
        """Room for one more of the caller's requests, while it is entered; 429 where its tenant has used up its own."""
        return UNBOUNDED if self.tenant is None else self.tenant.admitted()

    def used(self, consumed: int, sampled: int) -> None:
        """Charges the caller's tenant for a call's tokens."""
        if self.tenant is not None:
            self.tenant.used(consumed, sampled)


class Access:
    """The keys of one gateway, and whose they are."""

    def __init__(
        self, settings: GatewaySettings, counters: GatewayCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._open = not settings.keyed
        keys = {Role.AGENT: settings.api_key, Role.REWARD: settings.reward_key, Role.ADMIN: settings.admin_key}
        self._keys = {role: key.encode() for role, key in keys.items() if key}
        self.tenants: list[Tenant] = []
        self._of_tenants: dict[bytes, Caller] = {}
        specs = read_tenants(Path(settings.tenants)) if settings.tenants is not None else {}
        for name, spec in specs.items():
            tenant = Tenant(name, spec, counters, clock)
            self.tenants.append(tenant)
            pays = not spec.reward_keys and Role.REWARD not in self._keys
            for key in spec.keys:
                self._of_tenants[_digest(key.encode())] = Caller(Role.REWARD if pays else Role.AGENT, tenant)
            for key in spec.reward_keys:
                self._of_tenants[_digest(key.encode())] = Caller(Role.REWARD, tenant, True)
        for own in self._keys.values():
            if _digest(own) in self._of_tenants:
                raise InvalidInput(f"a key of {settings.tenants} is also the gateway's own; give each its own")
        reserved = frozenset(specs)
        self._callers = {role: Caller(role, None, role > Role.AGENT, reserved) for role in Role}

    def share_usage(self, table: UsageTable) -> None:
        """Counts what tenants use in a table of several processes, before anything was used."""
        for number, tenant in enumerate(self.tenants):
            tenant.usage = table.row(number)

    def check(self, request: Request, role: Role) -> None:
        """Raises `Unauthorized` unless the request carries a key that opens `role` for everything; no tenant's does."""
        if self.caller(request, role).tenant is not None:
            raise Unauthorized("this is not open to a tenant's key")

    def caller(self, request: Request, role: Role) -> Caller:
        """Who asks; `Unauthorized` unless the request carries a key that opens `role`, at least for its tenant."""
        if self._open or request.scope.get("headrace.trusted"):
            return self._callers[Role.ADMIN]
        given = presented_key(request)
        # Every key is compared, so that the time taken tells nothing; a tenant's is looked up by its digest.
        opened = [held for held, key in self._keys.items() if hmac.compare_digest(given, key)]
        of_tenant = self._of_tenants.get(_digest(given)) if self._of_tenants else None
        if of_tenant is not None:
            if role is Role.ADMIN or of_tenant.role < role:
                raise Unauthorized(_wanted(role, Role.ADMIN in self._keys))
            return of_tenant
        needed = Role.AGENT if role is Role.REWARD and role not in self._keys else role
        if needed is Role.AGENT and needed not in self._keys and not self._of_tenants:
            return self._callers[max(opened, default=Role.AGENT)]
        if not opened or max(opened) < needed:
            raise Unauthorized(_wanted(needed, Role.ADMIN in self._keys))
        return self._callers[max(opened)]


def tells_reward(metadata: Mapping[str, Any] | None) -> bool:
    """Whether metadata says who a reward is from, what it was made of, or that its own advantages stand in its place:
    that needs the key that a reward needs."""
    return metadata is not None and not metadata.keys().isdisjoint((REWARD_SOURCE, REWARD_INFO, SCORED_GROUP))


def _digest(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()


def _wanted(role: Role, has_admin: bool) -> str:
    if role is Role.ADMIN and not has_admin:
        return "this needs an admin key, and the gateway was started without --admin-key"
    name = {Role.AGENT: "an API key", Role.REWARD: "the reward key", Role.ADMIN: "the admin key"}[role]
    return f"this needs {name}, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
