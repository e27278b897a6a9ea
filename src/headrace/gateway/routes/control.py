"""The routes of trainers and operators: health, policy versions, rollout servers, pausing, stats and metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.api import metrics as scored_metrics
from headrace.data.errors import InvalidInput, shown
from headrace.gateway.access import Role
from headrace.gateway.errors import Refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import decode_body, json_response
from headrace.gateway.routes.bodies import DropSessionBody, PolicyVersionBody, ServerBody
from headrace.gateway.upstream.pause import MAX_PAUSE_LEASE_S, PAUSE_LEASE_S
from headrace.net.exposition import CONTENT_TYPE, exposition
from headrace.pool.embedded import DataPool


class ControlRoutes:
    """The handlers, bound to one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    # -- how it is -----------------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """200 while the process serves; `degraded` where steps wait or are lost."""
        trouble = self.gateway.trouble
        if trouble is None:
            return json_response({"status": "ok"})
        return json_response({"status": "degraded", "detail": trouble})

    async def ready(self, request: Request) -> Response:
        """200 once calls can be taken, with what agents will miss; 503 with the reason before."""
        why, warnings = self.gateway.why_not_ready, self.gateway.warnings
        if why is None:
            return json_response({"status": "ready", **({"warnings": warnings} if warnings else {})})
        return json_response({"detail": why}, 503, {"retry-after": "1"})

    # -- weights -------------------------------------------------------------------------------------------------------

    async def policy_version(self, request: Request) -> Response:
        """The newest policy version, and each server's."""
        self.gateway.access.caller(request, Role.AGENT)
        return json_response(self.gateway.models.get(request.query_params.get("model")).versions())

    async def set_policy_version(self, request: Request) -> Response:
        """What the servers, or one of them, sample with from now on."""
        gateway = self.gateway
        gateway.access.check(request, Role.ADMIN)
        asked = decode_body(await gateway.body(request), PolicyVersionBody)
        server = asked.server.rstrip("/") if asked.server is not None else None
        model = gateway.models.get(asked.model)
        trusted = bool(request.scope.get("headrace.trusted"))  # the pool was told when it was said first
        await model.set_version(asked.version, server, asked.adapter, tell_pool=not trusted)
        return json_response(model.versions())

    async def pause(self, request: Request) -> Response:
        """Holds new calls; those in flight end (drain), freeze (keep), or are cut and continued (abort-resume)."""
        self.gateway.access.check(request, Role.ADMIN)
        asked = request.query_params
        mode, lease_s = asked.get("mode", "drain"), _lease_s(asked.get("lease_s"))
        await self.gateway.models.pause(mode, asked.get("model"), lease_s)
        return json_response({"status": "paused", "mode": mode, "lease_s": lease_s})

    async def resume(self, request: Request) -> Response:
        """Lets calls through again."""
        self.gateway.access.check(request, Role.ADMIN)
        await self.gateway.models.resume(request.query_params.get("model"))
        return json_response({"status": "resumed"})

    # -- servers -------------------------------------------------------------------------------------------------------

    async def servers(self, request: Request) -> Response:
        """The rollout servers, as the gateway finds them."""
        self.gateway.access.check(request, Role.ADMIN)
        return json_response({"servers": self.gateway.models.servers()})

    async def add_server(self, request: Request) -> Response:
        """Adds a rollout server."""
        self.gateway.access.check(request, Role.ADMIN)
        asked = decode_body(await self.gateway.body(request), ServerBody)
        if not asked.address.startswith(("http://", "https://")):
            raise InvalidInput(f"address is {shown(asked.address)}; it looks like http://127.0.0.1:8001")
        await self.gateway.models.get(asked.model).upstream.add(asked.address.rstrip("/"))
        return json_response({"servers": self.gateway.models.servers()})

    async def remove_server(self, request: Request) -> Response:
        """Takes a rollout server out; its calls under way end."""
        self.gateway.access.check(request, Role.ADMIN)
        asked = decode_body(await self.gateway.body(request), ServerBody)
        upstream = self.gateway.models.get(asked.model).upstream
        try:
            await upstream.remove(asked.address.rstrip("/"))
        except InvalidInput as error:
            raise Refusal(str(error), 404, code="unknown_server") from None
        return json_response({"servers": self.gateway.models.servers()})

    async def drop_session(self, request: Request) -> Response:
        """Forgets what is known of a trajectory; only other workers ask for it."""
        if request.scope.get("headrace.trusted"):
            self.gateway.drop(decode_body(await request.body(), DropSessionBody).trajectory_uid)
            return json_response({"status": "ok"})
        raise Refusal("there is no such route", 404, code="no_route")

    # -- looking in ----------------------------------------------------------------------------------------------------

    async def stats(self, request: Request) -> Response:
        """The pool's ledger and the gateway's counters."""
        self.gateway.access.check(request, Role.ADMIN)
        return json_response(await self.gateway.stats())

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        self.gateway.access.check(request, Role.ADMIN)
        found = list(self.gateway.metrics())
        if isinstance(self.gateway.pool, DataPool):  # one that runs elsewhere may be away, and this must not wait
            found += scored_metrics.families((await self.gateway.pool.aio.stats())["desk"])
        return Response(exposition(found), headers={"content-type": CONTENT_TYPE})


def _lease_s(given: str | None) -> float:
    """The seconds after which a pause that nobody ends does so itself."""
    if given is None:
        return PAUSE_LEASE_S
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_PAUSE_LEASE_S:
        raise Refusal(
            f"lease_s is {given[:50]!r}; it must be a number of seconds above 0, {MAX_PAUSE_LEASE_S} at most", 400
        )
    return found
