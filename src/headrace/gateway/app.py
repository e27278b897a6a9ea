"""The application of a gateway: every route with its OpenAPI, and the way past FastAPI for calls.

FastAPI serves and lists the routes of control; its layers would cost an LLM call as much as reading it does. So POSTs
to the routes that calls take are found by their path in one table before FastAPI is asked (`add_fast_route`): the same
handlers, under the same paths, that it lists.
"""

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
from starlette.types import Receive, Scope, Send

from headrace.api import TrajectoryApi
from headrace.api import TrajectoryApiSettings as ApiSettings
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.routes import DashboardRoutes
from headrace.dashboard.source import RunningPool
from headrace.gateway.access import Role
from headrace.gateway.dialects import Dialect, anthropic, openai
from headrace.gateway.dialects.anthropic_messages import AnthropicMessages
from headrace.gateway.dialects.openai import NoDialect, OpenAIChat
from headrace.gateway.dialects.openai_completions import OpenAICompletions
from headrace.gateway.dialects.openai_responses import OpenAIResponses
from headrace.gateway.errors import Refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import BASE_PATH, Handler, catch_refusals, json_response, refusal_response
from headrace.gateway.live.conversations import LiveConversations
from headrace.gateway.pages import describe_route, gateway_page
from headrace.gateway.routes import bodies
from headrace.gateway.routes.calls import ModelRoutes, count_handler, discovered, llm_handler, named_in_path
from headrace.gateway.routes.control import ControlRoutes
from headrace.gateway.routes.feedback import feedback_handler
from headrace.gateway.routes.trajectories import RESERVED_UIDS, TrajectoryRoutes
from headrace.gateway.routes.whitebox import WhiteBoxRoutes
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.worker_control import DROP_SESSION
from headrace.pool.embedded import DataPool
from headrace.pool.http import pool_routes
from headrace.pool.remote import RemotePool
from headrace.tokens import Renderer
from headrace.version import __version__

_BELOW_BASE = BASE_PATH.encode() + b"/"
_ROOT = b"/v1/"
COUNTING = "/messages/count_tokens"


class GatewayApp(FastAPI):
    """FastAPI behind a table of fast routes: those below a base URL, and those without parameters.

    uids in paths are percent-encoded, so that a uid may hold a slash: paths are taken as they were sent, and parameters
    are decoded by whoever reads them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._fast: dict[bytes, Handler] = {}

    def add_fast_route(self, path: str, handler: Handler) -> None:
        """Serves POSTs to a path without FastAPI. `/{trajectory_uid}/{prompt_uid}/...` is the only kind of path with
        parameters. What the handler returns is called as an ASGI application: a response, or a `Call`."""
        self._fast[path.encode()] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            if scope["method"] == "POST":
                handler = self._fast_handler(scope, raw)
                if handler is not None:
                    answer = await handler(Request(scope, receive, send))
                    await answer(scope, receive, send)
                    return
            if b"%" in raw and not raw.startswith(b"/pool/"):
                scope["path"] = raw.decode("latin-1")
        await super().__call__(scope, receive, send)

    def _fast_handler(self, scope: Scope, raw: bytes) -> Handler | None:
        if raw.startswith(_ROOT):  # `/v1/chat/completions` is no trajectory v1 with a prompt chat
            return self._fast.get(raw)
        parts = raw.split(b"/", 3)
        if len(parts) == 4 and parts[1] and parts[2]:
            handler = self._fast.get(_BELOW_BASE + parts[3])
            if handler is not None:
                uid, prompt = parts[1].decode("latin-1"), parts[2].decode("latin-1")
                scope["path_params"] = {"trajectory_uid": uid, "prompt_uid": prompt}
                return handler
        return self._fast.get(raw)


def create_app(
    pool: DataPool | RemotePool,
    settings: GatewaySettings,
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
    live = LiveConversations(gateway, clock) if settings.open else None

    def authorize(request: Request) -> None:
        """The pool and the Trajectory API are no agent's: where any key is set, they need the admin's."""
        gateway.access.check(request, Role.ADMIN)

    given = {name: getattr(settings, name) for name in ("serve_channel", "heartbeat_s", "max_body_mb")}
    api = TrajectoryApi(pool, ApiSettings(**given), authorize=authorize, front_page=partial(gateway_page, gateway))

    dashboard = _dashboard(gateway, pool, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start(api.start)
        if live is not None:
            await live.start()
        try:
            yield
        finally:
            await dashboard.closing()
            await api.close()
            if live is not None:
                await live.close()
            await gateway.close(drain_s)

    app = GatewayApp(
        title="Headrace Gateway",
        version=__version__,
        description="Any agent in, exact tokens out.",
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )
    app.state.gateway = gateway
    app.state.live = live
    app.router.routes += dashboard.routes
    _add_routes(app, gateway, live)
    app.router.routes += [*pool_routes(pool, authorize=authorize, backups=settings.backups), *api.routes]
    if gateway.models.passing:  # last: what is no route of ours may still be one of a provider's
        for path, find in (("/v1", discovered(live)), (BASE_PATH, named_in_path(gateway))):
            handler = llm_handler(gateway, NoDialect(), "other", find)
            app.router.routes.append(Route(f"{path}/{{rest:path}}", handler, methods=["POST"]))
    return app


def _dashboard(gateway: Gateway, pool: DataPool | RemotePool, settings: GatewaySettings) -> DashboardRoutes:
    """The dashboard of a gateway: for its admin, where it has keys."""
    closed = None
    if settings.keyed and not settings.admin_key:
        closed = "the dashboard needs an admin key, and the gateway was started without --admin-key"

    def renderer() -> Renderer | None:
        return next((model.renderer for model in gateway.models if model.loaded), None)

    source = RunningPool(pool, "gateway", editable=settings.dashboard == "edit")
    metrics = None if settings.dashboard_metrics is None else Path(settings.dashboard_metrics)
    shown = Dashboard(source, metrics=metrics, renderer=renderer, servers=gateway.models.servers)
    return DashboardRoutes(shown, DashboardLogin(settings.admin_key, closed=closed))


def _add_routes(app: GatewayApp, gateway: Gateway, live: LiveConversations | None) -> None:
    trajectories, white, control = TrajectoryRoutes(gateway), WhiteBoxRoutes(gateway), ControlRoutes(gateway)
    models = ModelRoutes(gateway, live)

    def add(method: str, path: str, handler: Handler, body: type | None = None, **about: Any) -> None:
        app.add_api_route(path, handler, methods=[method], **describe_route(path, handler, body, **about))
        if method == "POST" and (path.startswith(BASE_PATH) or "{" not in path):
            app.add_fast_route(path, handler)

    def add_openai(method: str, path: str, handler: Handler, **about: Any) -> None:
        add(method, path, catch_refusals(handler, openai.error_body), **about)

    def add_plain(method: str, path: str, handler: Handler, body: type | None = None, **about: Any) -> None:
        add(method, path, catch_refusals(handler), body, **about)

    dialects: dict[str, Dialect] = {
        "/chat/completions": OpenAIChat(),
        "/completions": OpenAICompletions(),
        "/responses": OpenAIResponses(),
        "/messages": AnthropicMessages(),
    }
    route = COUNTING.strip("/")
    find = discovered(live)
    for path, dialect in dialects.items():
        about = ", for a live service: conversations are found."
        add("POST", f"/v1{path}", llm_handler(gateway, dialect, path.strip("/"), find, about), dialect=path)
    count = count_handler(gateway, AnthropicMessages(), route, find, ", for a live service; nothing is begun.")
    add("POST", f"/v1{COUNTING}", count, dialect=COUNTING)
    add_plain("POST", "/v1/feedback", feedback_handler(gateway, live), bodies.FeedbackBody)
    add_openai("GET", "/v1/models", models.live_models)

    find = named_in_path(gateway)
    for path, dialect in dialects.items():
        about = ", streamed or not; each answer is recorded."
        call = llm_handler(gateway, dialect, path.strip("/"), find, about)
        for prefix in ("/v1", ""):
            add("POST", f"{BASE_PATH}{prefix}{path}", call, dialect=path, aliased=not prefix)
    count = count_handler(gateway, AnthropicMessages(), route, find, "; nothing is sampled and nothing recorded.")
    for prefix in ("/v1", ""):
        add("POST", f"{BASE_PATH}{prefix}{COUNTING}", count, dialect=COUNTING, aliased=not prefix)
    for name, handler, body in (
        ("register_trajectory", trajectories.register_trajectory, bodies.RegisterTrajectoryBody),
        ("reward", trajectories.reward, bodies.RewardBody),
        ("complete_trajectory", trajectories.complete_trajectory, bodies.CompleteTrajectoryBody),
        ("fail_trajectory", trajectories.fail_trajectory, bodies.FailTrajectoryBody),
    ):
        for prefix in ("/v1", ""):
            add_plain("POST", f"{BASE_PATH}{prefix}/{name}", handler, body, aliased=not prefix)
    for prefix in ("/v1", ""):
        add_openai("GET", f"{BASE_PATH}{prefix}/models", models.models, aliased=not prefix)

    add_plain("POST", "/init_trajectory", trajectories.init_trajectory, bodies.InitTrajectoryBody)
    complete = trajectories.complete_trajectory
    add_plain("POST", "/complete_trajectory/{trajectory_uid}", complete, bodies.CompleteTrajectoryBody)
    fail = trajectories.fail_trajectory
    add_plain("POST", "/fail_trajectory/{trajectory_uid}", fail, bodies.FailTrajectoryBody)
    add_plain("POST", "/generate", white.generate, bodies.GenerateBody)
    add_plain("POST", "/submit_steps", white.submit_steps, bodies.SubmitStepsBody)
    add_plain("POST", "/compute_reward", white.compute_reward, bodies.ComputeRewardBody)

    add_plain("GET", "/health", control.health)
    add_plain("GET", "/ready", control.ready)
    add_plain("GET", "/policy_version", control.policy_version)
    add_plain("POST", "/policy_version", control.set_policy_version, bodies.PolicyVersionBody)
    add_plain("POST", "/pause", control.pause)
    add_plain("POST", "/resume", control.resume)
    add_plain("GET", "/servers", control.servers)
    add_plain("POST", "/servers", control.add_server, bodies.ServerBody)
    add_plain("DELETE", "/servers", control.remove_server, bodies.ServerBody)
    add_plain("POST", DROP_SESSION, control.drop_session, aliased=True)
    add_plain("GET", "/trajectories", trajectories.list_trajectories)
    add_plain("POST", "/trajectories", trajectories.trajectory_states, bodies.TrajectoryStatesBody)
    add_plain("GET", "/trajectories/{trajectory_uid}", trajectories.trajectory)
    add_plain("DELETE", "/trajectories/{trajectory_uid}", trajectories.delete_trajectory)
    add_plain("GET", "/stats", control.stats)
    add_plain("GET", "/metrics", control.metrics)


async def _no_route(request: Request, error: Exception) -> Response:
    """A path or a method that is not there: said in the shape that the caller's SDK reads."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 405:
        refusal = Refusal(f"{request.method} is not what {path} takes", 405, code="method_not_allowed")
    else:
        refusal = Refusal(f"there is no {path} here; see /docs", error.status_code, code="no_route")
    parts = path.strip("/").split("/")
    rest = parts[1:] if parts[0] == "v1" else parts[2:] if parts[0] not in RESERVED_UIDS else []
    if rest:
        dialect = anthropic if "messages" in rest else openai
        return json_response(dialect.error_body(refusal), refusal.status)
    return refusal_response(refusal)
