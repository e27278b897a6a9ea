"""Root `/v1`: the routes of SDKs, for a service that can change nothing but its base URL, and what people say later."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.data.errors import InvalidInput
from headrace.data.step import finite
from headrace.gateway.access import Role
from headrace.gateway.bodies import Feedback
from headrace.gateway.counting import Count
from headrace.gateway.dialects import CountingDialect, Dialect
from headrace.gateway.errors import Refusal, refusal
from headrace.gateway.exchange import Exchange
from headrace.gateway.gateway import Gateway
from headrace.gateway.live import feedback
from headrace.gateway.live.live import Live
from headrace.gateway.live.place import Found
from headrace.gateway.responses import json_response
from headrace.gateway.routes.blackbox import BlackBox, refused_in
from headrace.gateway.routing import Handler, read
from headrace.pool.errors import Unauthorized


class LiveService:
    """The handlers, bound to one gateway; without `live` they say what would make them answer."""

    def __init__(self, gateway: Gateway, live: Live | None) -> None:
        self.gateway = gateway
        self._live = live
        self._black = BlackBox(gateway)

    def llm(self, dialect: Dialect, route: str) -> Handler:
        """A handler for one dialect's calls."""
        gateway = self.gateway

        async def call(request: Request) -> Exchange | Response:
            try:
                caller = gateway.access.caller(request, Role.AGENT)
                place = Found(self.live, caller, request)
            except (Unauthorized, InvalidInput, Refusal) as error:
                refused = refusal(error)
                gateway.counters.add("calls", route, str(refused.status))
                return refused_in(dialect, refused)
            return Exchange(gateway, dialect, route, request, caller, place)

        call.__name__ = f"live_{route.replace('/', '_')}"
        call.__doc__ = f"{dialect.vendor}'s {route.replace('/', ' ')}, for a live service: conversations are found."
        return call

    def count(self, dialect: CountingDialect, route: str) -> Handler:
        """A handler that says how many tokens a call's prompt would have."""
        gateway = self.gateway

        async def count(request: Request) -> Count | Response:
            try:
                caller = gateway.access.caller(request, Role.AGENT)
                place = Found(self.live, caller, request)
            except (Unauthorized, InvalidInput, Refusal) as error:
                return refused_in(dialect, refusal(error))
            return Count(gateway, dialect, route, request, caller, place)

        count.__name__ = f"live_{route.replace('/', '_')}"
        count.__doc__ = f"{dialect.vendor}'s {route.replace('/', ' ')}, for a live service; nothing is begun."
        return count

    async def models(self, request: Request) -> Response:
        """The models of the rollout servers, for a live service."""
        _ = self.live
        return await self._black.models(request)

    async def feedback(self, request: Request) -> Response:
        """What an answer was worth, by its response id; `late` once a trainer has it."""
        gateway, _ = self.gateway, self.live
        caller = gateway.access.caller(request, Role.REWARD)
        with caller.admitted():
            asked = read(await gateway.body(request, caller), Feedback)
            finite(asked.reward, "reward")
            told = await feedback.give(gateway, caller, asked)
        gateway.counters.add("feedback", told["status"])
        return json_response(told)

    @property
    def live(self) -> Live:
        if self._live is None:
            raise Refusal(
                "calls under /v1 need a gateway that was started with --open; otherwise begin a trajectory with "
                "POST /init_trajectory and use the base_url that it answers",
                404,
                code="not_open",
            )
        return self._live
