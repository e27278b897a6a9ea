"""The Trajectory API as an application: every route, on its own or among another application's."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.responses import ApiResponse, deliver, gzipped, json_response
from headrace.api.routes import Routes
from headrace.api.settings import TrajectoryApiSettings
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.routes import add_dashboard
from headrace.dashboard.source import RunningPool
from headrace.data.errors import HeadraceError
from headrace.net.front_page import (
    KEY_NEEDED,
    KIND,
    channels,
    links,
    page,
    table,
    text,
    wants_page,
)
from headrace.net.server import BodyTooLarge, presented_key
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Unauthorized
from headrace.pool.remote import RemotePool

log = logging.getLogger("headrace.api")

#: By error code. A client that sees 5xx tries again; one that sees 4xx drops its data: none is for want of room.
HTTP_STATUS = {"invalid_input": 422, "bad_gzip": 400, "not_found": 404, "unauthorized": 401, "internal": 500}
OTHER_STATUS = 503

#: The routes that are called for every group and every batch.
BUSIEST = ("/scored_data", "/scored_data_list", "/batch", "/status-env")

Handler = Callable[[Request], Awaitable[ApiResponse]]
Page = Callable[[Request], Awaitable[bytes]]
#: What the front page points to, with what is there.
LINKS = {
    "/dashboard": "figures, trajectories with their tokens, groups",
    "/status": "the step and the queue",
    "/info": "what the trainer registered",
    "/wandb_info": "its group and project at Weights & Biases",
    "/latest_example": "the newest group that waits",
    "/metrics": "the numbers of its groups, for Prometheus",
    "/docs": "every route, with its body and its answer",
}


class TrajectoryApi:
    """The routes of one Trajectory API on a pool, which stays the caller's."""

    def __init__(
        self,
        pool: DataPool | RemotePool,
        settings: TrajectoryApiSettings | None = None,
        *,
        authorize: Callable[[Request], None] | None = None,
        front_page: Page | None = None,
    ) -> None:
        """`authorize` raises `Unauthorized` where a request is refused; without it, requests need the key. `front_page`
        is what a browser sees at the root; it shows no more than its caller may see."""
        self._pool = pool
        self._settings = settings or TrajectoryApiSettings()
        self._authorize = authorize if authorize is not None else self._check_key
        self._front_page = front_page if front_page is not None else self._own_page
        self._routes = Routes(pool.aio, self._settings)

    async def start(self) -> None:
        """To be called before the first request: returns batches that an earlier process had out."""
        if isinstance(self._pool, DataPool):
            await self._pool.aio.desk_release()  # what an earlier process was handing over did not arrive
        if self._settings.serve_channel is not None:
            await self._pool.aio.desk_serve(self._settings.serve_channel)

    async def close(self) -> None:
        """To be called after the last request: tells the pool which keys it may forget."""
        await self._routes.keys.close()

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes, to put into any Starlette or FastAPI application, which then starts and closes the API."""
        do = self._routes
        handlers: dict[str, dict[str, Handler]] = {
            "/register": {"POST": do.register},
            "/register-env": {"POST": do.register_env},
            "/disconnect-env": {"POST": do.disconnect_env},
            "/wandb_info": {"GET": do.wandb_info},
            "/info": {"GET": do.info},
            "/batch": {"GET": do.batch},
            "/latest_example": {"GET": do.latest_example},
            "/scored_data": {"POST": do.scored_data},
            "/scored_data_list": {"POST": do.scored_data_list},
            "/status": {"GET": do.status},
            "/status-env": {"GET": do.status_env},
            "/reset_data": {"GET": do.reset_data, "POST": do.reset_data},
        }
        root = _Endpoint({"GET": do.root}, self._root, self._settings.answer_s)
        return [Route("/", self._with_cors(root)), *self._route_all(handlers)]

    @property
    def own_routes(self) -> list[BaseRoute]:
        """The routes of an API that is an application of its own; another application has such routes itself."""
        do = self._routes
        return self._route_all(
            {"/metrics": {"GET": do.metrics}, "/openapi.json": {"GET": do.openapi}, "/docs": {"GET": do.docs}}
        )

    def _route_all(self, handlers: Mapping[str, Mapping[str, Handler]]) -> list[BaseRoute]:
        return [Route(path, self._with_cors(self._endpoint(each))) for path, each in handlers.items()]

    def _with_cors(self, endpoint: _Endpoint) -> ASGIApp:
        """Lets web pages of the origins in the settings call, and no others."""
        origins = self._settings.allow_origin
        if not origins:
            return endpoint
        return CORSMiddleware(endpoint, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    def _endpoint(self, by_method: Mapping[str, Handler]) -> _Endpoint:
        return _Endpoint(by_method, self._answer, self._settings.answer_s)

    async def _answer(self, handler: Handler, request: Request) -> ApiResponse:
        """The handler's response to a request that is authorized, or the error as one."""
        try:
            self._authorize(request)
            return gzipped(await handler(request), request)
        except HeadraceError as error:
            return _error_response(str(error), HTTP_STATUS.get(error.code, OTHER_STATUS))
        except BodyTooLarge:
            return _error_response(f"the body is larger than {self._settings.max_body_mb:g} MB; send it in parts", 413)

    async def _root(self, handler: Handler, request: Request) -> ApiResponse:
        """A page for a browser, which needs no key; for other clients what Atropos' API answers."""
        if wants_page(request):
            return gzipped(ApiResponse(await self._front_page(request), content_type=KIND.encode()), request)
        return await self._answer(handler, request)

    async def _own_page(self, request: Request) -> bytes:
        try:
            self._authorize(request)
            stats = await self._pool.aio.stats()
            groups = {name: stats["desk"][name] for name in ("step", "environments", "posted", "served", "duplicates")}
            dead = {"dead letters": sum(stats["desk"]["dead_letters"].values())}
            numbers = [table("Groups of environments", [groups | dead], ""), channels(stats)]
        except Unauthorized:
            numbers = [text("Groups and channels", KEY_NEEDED)]
        except HeadraceError as error:
            numbers = [text("Groups and channels", f"The pool does not answer: {error}")]
        return page(
            "Trajectory API", "Ready: environments post, trainers take.", [*numbers, links("Where to look", LINKS)]
        )

    def _check_key(self, request: Request) -> None:
        key = self._settings.api_key
        if key is not None and not hmac.compare_digest(presented_key(request), key.encode()):
            raise Unauthorized("this API asks for its key, as `Authorization: Bearer KEY`")


def create_app(pool: DataPool | RemotePool, settings: TrajectoryApiSettings | None = None) -> Starlette:
    """A Trajectory API as an application of its own, with the pool's dashboard. The pool stays the caller's: it is not
    closed here."""
    settings = settings or TrajectoryApiSettings()
    api = TrajectoryApi(pool, settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await api.start()
        yield
        await api.close()
        if isinstance(pool, RemotePool):
            await pool.aclose()

    routes = [*api.routes, *api.own_routes]
    app = _Application(routes=routes, lifespan=lifespan, exception_handlers={404: _no_such_route})
    source = RunningPool(pool, "Trajectory API", editable=settings.dashboard == "edit")
    add_dashboard(app, Dashboard(source), DashboardLogin(settings.api_key))
    return app


class _Application(Starlette):
    """An application whose busiest routes answer without its middleware, which only turns what they raise into
    answers, and they raise nothing."""

    def __init__(self, routes: Sequence[BaseRoute], **options: Any) -> None:
        super().__init__(routes=routes, **options)
        self._busiest = {
            route.path: route.app for route in routes if isinstance(route, Route) and route.path in BUSIEST
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._busiest.get(scope["path"]) if scope["type"] == "http" and not scope.get("root_path") else None
        await (super().__call__ if found is None else found)(scope, receive, send)


class _Endpoint:
    """One path as an ASGI application: it has the connection, and so knows whether a response arrived."""

    def __init__(
        self,
        by_method: Mapping[str, Handler],
        answered: Callable[[Handler, Request], Awaitable[ApiResponse]],
        answer_s: float,
    ) -> None:
        self._by_method = by_method
        self._answered = answered
        self._answer_s = answer_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        handler = self._by_method.get(scope["method"])
        if handler is None:
            response = _error_response(f"{scope['method']} is not what {scope['path']} takes", 405)
        else:
            try:
                response = await self._answered(handler, request)
            except ClientDisconnect:
                return
            except Exception as error:
                log.exception("a request failed")
                response = _error_response(f"the API failed at this ({type(error).__name__}); its log says where", 500)
        await deliver(response, request, send, self._answer_s)


async def _no_such_route(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"there is no {request.url.path} here"}, 404)


def _error_response(detail: str, status: int) -> ApiResponse:
    return json_response({"detail": detail}, status)
