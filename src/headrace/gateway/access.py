"""Who may do what. Three keys, each of which opens what the one before it opens.

Agents call models; whoever holds the reward key may also pay and end trajectories; the admin key opens the rest. Where
any key is set, what only an admin may see is closed until there is an admin key: a ground truth is never readable with
an agent's.
"""

from __future__ import annotations

import hmac
from enum import IntEnum

from starlette.requests import Request

from headrace.gateway.settings import Settings
from headrace.pool.errors import Unauthorized
from headrace.serving import presented_key


class Role(IntEnum):
    AGENT = 0
    REWARD = 1
    ADMIN = 2


class Access:
    """The keys of one gateway."""

    def __init__(self, settings: Settings) -> None:
        self._open = not settings.keyed
        keys = {Role.AGENT: settings.api_key, Role.REWARD: settings.reward_key, Role.ADMIN: settings.admin_key}
        self._keys = {role: key.encode() for role, key in keys.items() if key}

    def check(self, request: Request, role: Role) -> None:
        """Raises `Unauthorized` unless the request carries a key that opens `role`."""
        if self._open or request.scope.get("headrace.trusted"):
            return
        needed = Role.AGENT if role is Role.REWARD and role not in self._keys else role
        if needed is Role.AGENT and needed not in self._keys:
            return
        given = presented_key(request)
        # Every key is compared, so that the time taken tells nothing.
        opened = [hmac.compare_digest(given, key) for held, key in self._keys.items() if held >= needed]
        if not any(opened):
            raise Unauthorized(_wanted(needed, Role.ADMIN in self._keys))


def _wanted(role: Role, has_admin: bool) -> str:
    if role is Role.ADMIN and not has_admin:
        return "this needs an admin key, and the gateway was started without --admin-key"
    name = {Role.AGENT: "an API key", Role.REWARD: "the reward key", Role.ADMIN: "the admin key"}[role]
    return f"this needs {name}, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
