"""The application: every route of a gateway, and its OpenAPI."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace import __version__
from headrace.api import Api
from headrace.api import Settings as ApiSettings
from headrace.gateway import bodies
from headrace.gateway.access import Role
from headrace.gateway.dialects import Dialect, anthropic, openai
from headrace.gateway.dialects.anthropic_messages import AnthropicMessages
from headrace.gateway.dialects.openai import NoDialect
from headrace.gateway.dialects.openai_chat import OpenAIChat
from headrace.gateway.dialects.openai_completions import OpenAICompletions
from headrace.gateway.dialects.openai_responses import OpenAIResponses
from headrace.gateway.errors import Refusal
from headrace.gateway.front import Front
from headrace.gateway.front_page import gateway_page
from headrace.gateway.gateway import Gateway
from headrace.gateway.hub import DROP
from headrace.gateway.live.live import Live
from headrace.gateway.openapi import describe
from headrace.gateway.responses import json_response, refused
from headrace.gateway.routes.blackbox import RESERVED, BlackBox
from headrace.gateway.routes.control import Control
from headrace.gateway.routes.live import LiveService
from headrace.gateway.routes.whitebox import WhiteBox
from headrace.gateway.routing import BASE, Handler, LeanRoute, plain
from headrace.gateway.settings import Settings
from headrace.pool.embedded import DataPool
from headrace.pool.http import pool_routes
from headrace.pool.remote import RemotePool


def create_app(
    pool: DataPool | RemotePool,
    settings: Settings,
    *,
    outbox_file: Path | None = None,
    drain_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """A gateway on a pool, with the Trajectory API beside it. The pool stays the caller's: it is not closed here.

    `drain_s`: how long the end waits for a pool that is out of reach; None: as long as it takes. `clock`: by which
    conversations of a live service are idle.
    """
    gateway = Gateway(pool, settings, outbox_file=outbox_file)
    live = Live(gateway, clock) if settings.open else None
    api = _trajectory_api(pool, settings, gateway)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start(api.start)
        if live is not None:
            await live.start()
        try:
            yield
        finally:
            await api.close()
            if live is not None:
                await live.close()
            await gateway.close(drain_s)

    app = Front(
        title="Headrace Gateway",
        version=__version__,
        description="Any agent in, exact tokens out.",
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )
    app.state.gateway = gateway
    app.state.live = live
    app.router.route_class = LeanRoute
    _add_routes(app, gateway, live)

    def authorize(request: Request) -> None:
        gateway.access.check(request, Role.ADMIN)

    app.router.routes += [*pool_routes(pool, authorize=authorize, backups=settings.backups), *api.routes]
    if gateway.models.passing:  # last: what is no route of ours may still be one of a provider's
        app.router.routes.append(
            Route("/v1/{rest:path}", LiveService(gateway, live).llm(NoDialect(), "other"), methods=["POST"])
        )
        other = BlackBox(gateway).llm(NoDialect(), "other")
        app.router.routes.append(Route(f"{BASE}/{{rest:path}}", other, methods=["POST"]))
    return app


def _trajectory_api(pool: DataPool | RemotePool, settings: Settings, gateway: Gateway) -> Api:
    """It is no agent's: where any key is set, it needs the admin's."""

    def authorize(request: Request) -> None:
        gateway.access.check(request, Role.ADMIN)

    told = {name: getattr(settings, name) for name in ("serve_channel", "heartbeat_s", "max_body_mb")}
    return Api(pool, ApiSettings(**told), authorize=authorize, front_page=partial(gateway_page, gateway))


def _add_routes(app: Front, gateway: Gateway, live: Live | None) -> None:
    black, white, control = BlackBox(gateway), WhiteBox(gateway), Control(gateway)
    service = LiveService(gateway, live)

    def add(method: str, path: str, handler: Handler, body: type | None = None, **about: Any) -> None:
        app.add_api_route(path, handler, methods=[method], **describe(path, handler, body, **about))
        if method == "POST" and (path.startswith(BASE) or "{" not in path):
            app.shorten(path, handler)

    dialects: dict[str, Dialect] = {
        "/chat/completions": OpenAIChat(),
        "/completions": OpenAICompletions(),
        "/responses": OpenAIResponses(),
        "/messages": AnthropicMessages(),
    }
    for path, dialect in dialects.items():
        add("POST", f"/v1{path}", service.llm(dialect, path.strip("/")), dialect=path)
    counting = "/messages/count_tokens"
    add("POST", f"/v1{counting}", service.count(AnthropicMessages(), counting.strip("/")), dialect=counting)
    add("POST", "/v1/feedback", plain(service.feedback), bodies.Feedback)
    add("GET", "/v1/models", plain(service.models))
    for path, dialect in dialects.items():
        for prefix in ("/v1", ""):
            call = black.llm(dialect, path.strip("/"))
            add("POST", f"{BASE}{prefix}{path}", call, dialect=path, aliased=not prefix)
    for prefix in ("/v1", ""):
        count = black.count(AnthropicMessages(), counting.strip("/"))
        add("POST", f"{BASE}{prefix}{counting}", count, dialect=counting, aliased=not prefix)
    for name, handler, body in (
        ("register_trajectory", black.register_trajectory, bodies.RegisterTrajectory),
        ("reward", black.reward, bodies.Reward),
        ("complete_trajectory", black.complete_trajectory, bodies.CompleteTrajectory),
    ):
        for prefix in ("/v1", ""):
            add("POST", f"{BASE}{prefix}/{name}", plain(handler), body, aliased=not prefix)
    for prefix in ("/v1", ""):
        add("GET", f"{BASE}{prefix}/models", plain(black.models), aliased=not prefix)

    add("POST", "/init_trajectory", plain(black.init_trajectory), bodies.InitTrajectory)
    add("POST", "/complete_trajectory/{trajectory_uid}", plain(black.complete_trajectory), bodies.CompleteTrajectory)
    add("POST", "/generate", plain(white.generate), bodies.Generate)
    add("POST", "/submit_steps", plain(white.submit_steps), bodies.SubmitSteps)
    add("POST", "/compute_reward", plain(white.compute_reward), bodies.ComputeReward)

    add("GET", "/health", plain(control.health))
    add("GET", "/ready", plain(control.ready))
    add("GET", "/policy_version", plain(control.policy_version))
    add("POST", "/policy_version", plain(control.set_policy_version), bodies.PolicyVersion)
    add("POST", "/pause", plain(control.pause))
    add("POST", "/resume", plain(control.resume))
    add("GET", "/servers", plain(control.servers))
    add("POST", "/servers", plain(control.add_server), bodies.Server)
    add("DELETE", "/servers", plain(control.remove_server), bodies.Server)
    add("POST", DROP, plain(control.drop_session), aliased=True)
    add("GET", "/trajectories", plain(black.list_trajectories))
    add("GET", "/trajectories/{trajectory_uid}", plain(control.trajectory))
    add("DELETE", "/trajectories/{trajectory_uid}", plain(black.delete_trajectory))
    add("GET", "/stats", plain(control.stats))
    add("GET", "/metrics", plain(control.metrics))


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or a method that is not there: said in the shape that the caller's SDK reads."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 405:
        refusal = Refusal(f"{request.method} is not what {path} takes", 405, code="method_not_allowed")
    else:
        refusal = Refusal(f"there is no {path} here; see /docs", error.status_code, code="no_route")
    parts = path.strip("/").split("/")
    rest = parts[1:] if parts[0] == "v1" else parts[2:] if parts[0] not in RESERVED else []
    if rest:
        dialect = anthropic if "messages" in rest else openai
        return json_response(dialect.error_body(refusal), refusal.status)
    return refused(refusal)
