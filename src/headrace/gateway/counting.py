"""`Count`: a call that only asks how many tokens its prompt would have. Nothing is sampled, and nothing recorded."""

from __future__ import annotations

from starlette.requests import Request

from headrace.gateway.access import Caller
from headrace.gateway.dialects import CountingDialect
from headrace.gateway.exchange import Exchange
from headrace.gateway.gateway import Gateway
from headrace.gateway.places import Place
from headrace.gateway.presence import Presence
from headrace.gateway.responses import json_response
from headrace.gateway.sending import Sending
from headrace.gateway.session import digest_of


class Count(Exchange):
    """What it says is the length of the call's own prompt, if that is made next."""

    def __init__(
        self,
        gateway: Gateway,
        dialect: CountingDialect,
        route: str,
        request: Request,
        caller: Caller,
        place: Place,
    ) -> None:
        super().__init__(gateway, dialect, route, request, caller, place)
        self._counter = dialect

    async def _take(self, body: bytes, presence: Presence, sending: Sending) -> None:
        gateway, dialect = self._gateway, self._counter
        ask, digest = await gateway.reading.call(body, dialect.read_count, digest_of)
        policy = gateway.models.called(ask.model)
        planner = policy.calls.planner
        planner.settle(ask)
        try:
            session = await self._place.session(ask, policy, digest, recorded=False)
            with gateway.sessions.using(session):
                tokens = await planner.length(session, ask)
        finally:
            await self._place.left()
        await sending.whole(json_response(dialect.counted(tokens), 200, dialect.headers(self._call_id)))
