"""The routes of LLM calls, in every dialect: below a base URL, whose path names the trajectory, and under root `/v1`
for a live service, whose conversations are discovered. Both have the same handlers; only the call's target differs."""

from __future__ import annotations

import uuid
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from headrace.data.errors import InvalidInput
from headrace.gateway.access import Caller, Role
from headrace.gateway.call import Call, CallTarget, CountTokensCall, NamedTrajectory
from headrace.gateway.dialects import CountingDialect, Dialect
from headrace.gateway.errors import Refusal, refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import Handler, json_response, path_uid, retry_header
from headrace.gateway.live.conversations import LiveConversations
from headrace.gateway.live.target import DiscoveredConversation
from headrace.gateway.routes.trajectories import check_uids
from headrace.pool.errors import Unauthorized


class FindTarget(Protocol):
    """Says where a request's call belongs. `begins`: the call may begin its trajectory."""

    def __call__(self, request: Request, caller: Caller, *, begins: bool) -> CallTarget: ...


def named_in_path(gateway: Gateway) -> FindTarget:
    """The targets of calls below a base URL."""

    def find(request: Request, caller: Caller, *, begins: bool) -> CallTarget:
        uid, prompt = path_uid(request, "trajectory_uid"), path_uid(request, "prompt_uid")
        if begins and gateway.settings.open:
            check_uids(gateway, uid, prompt)
        return NamedTrajectory(gateway, caller, uid, prompt)

    return find


def discovered(live: LiveConversations | None) -> FindTarget:
    """The targets of calls under root `/v1`."""

    def find(request: Request, caller: Caller, *, begins: bool) -> CallTarget:
        return DiscoveredConversation(opened(live), caller, request)

    return find


def opened(live: LiveConversations | None) -> LiveConversations:
    """The live service; 404 where the gateway has none."""
    if live is None:
        raise Refusal(
            "calls under /v1 need a gateway that was started with --open; otherwise begin a trajectory with "
            "POST /init_trajectory and use the base_url that it answers",
            404,
            code="not_open",
        )
    return live


def llm_handler(gateway: Gateway, dialect: Dialect, route: str, find: FindTarget, summary: str = "") -> Handler:
    """A handler for one dialect's calls. `route` is what counters call it, `summary` what the OpenAPI adds to it."""

    async def call(request: Request) -> Call | Response:
        try:
            caller = gateway.access.caller(request, Role.AGENT)
            target = find(request, caller, begins=True)
        except (Unauthorized, InvalidInput, Refusal) as error:
            refused = refusal(error)
            gateway.counters.add("calls", route, str(refused.status))
            return _refused_in(dialect, refused)
        return Call(gateway, dialect, route, request, caller, target)

    call.__doc__ = f"{dialect.vendor}'s {route.replace('/', ' ')}{summary}"
    return call


def count_handler(
    gateway: Gateway, dialect: CountingDialect, route: str, find: FindTarget, summary: str = ""
) -> Handler:
    """A handler that says how many tokens a call's prompt would have, if the call is made next."""

    async def count(request: Request) -> CountTokensCall | Response:
        try:
            caller = gateway.access.caller(request, Role.AGENT)
            target = find(request, caller, begins=False)
        except (Unauthorized, InvalidInput, Refusal) as error:
            return _refused_in(dialect, refusal(error))
        return CountTokensCall(gateway, dialect, route, request, caller, target)

    count.__doc__ = f"{dialect.vendor}'s {route.replace('/', ' ')}{summary}"
    return count


class ModelRoutes:
    """The list of models that an SDK may ask for, with either kind of base URL."""

    def __init__(self, gateway: Gateway, live: LiveConversations | None) -> None:
        self._gateway = gateway
        self._live = live

    async def models(self, request: Request) -> Response:
        """The models of the rollout servers."""
        self._gateway.access.caller(request, Role.AGENT)
        _ = self._gateway.calls  # the servers are asked nothing before they were probed
        return json_response(self._gateway.models.listed(await self._gateway.upstream.models()))

    async def live_models(self, request: Request) -> Response:
        """The models of the rollout servers, for a live service."""
        opened(self._live)
        return await self.models(request)


def _refused_in(dialect: Dialect, refused: Refusal) -> Response:
    """The answer to a call that is refused before its body is read."""
    headers = {**dialect.headers(uuid.uuid4().hex), **retry_header(refused)}
    return json_response(dialect.error(refused), refused.status, headers)
