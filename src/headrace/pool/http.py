"""The pool served over HTTP: routes to mount, and an application of its own.

`POST /pool/call` takes and answers frames (see `wire`); that is what `connect("http://...")` speaks. The `GET` routes
answer JSON, for people and scripts. With a key, every route but `/health` and the front page asks for it, as
`Authorization: Bearer` or `x-api-key`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.json import to_json
from headrace.data.keys import usable_key
from headrace.net import server
from headrace.net.front_page import (
    KEY_NEEDED,
    KIND,
    channels,
    links,
    page,
    text,
    wants_page,
)
from headrace.net.server import (
    BodyTooLarge,
    LocalOnly,
    loopback,
    presented_key,
    read_body,
)
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Unauthorized
from headrace.pool.remote import RemotePool
from headrace.pool.service import CallerGone, answer
from headrace.pool.wire import FRAME_TYPE

#: The HTTP status of each error, by its code.
STATUS = {
    "invalid_input": 422,
    "bad_frame": 400,
    "foreign_frame": 400,
    "conflict": 409,
    "not_found": 404,
    "gone": 404,
    "forgotten": 404,
    "lease_lost": 409,
    "not_registered": 409,
    "pool_full": 503,
    "pool_closed": 503,
    "disk_full": 507,
    "unauthorized": 401,
}

#: What the front page of a pool that is served alone points to.
LINKS = {
    "/health": "200 while it serves",
    "/pool/stats": "its ledger and its channels",
    "/pool/groups": "groups of a channel (?channel=train)",
    "/pool/trajectories": "trajectories of a channel",
    "/pool/events": "what happened, newest last",
}

#: Query parameters that are text, whatever they look like.
TEXTS = ("channel", "prompt_uid", "trajectory_uid", "tag", "state", "cursor")

Handler = Callable[[Request], Awaitable[Response]]


def pool_routes(
    pool: DataPool | RemotePool,
    *,
    key: str | None = None,
    authorize: Callable[[Request], None] | None = None,
    max_body_mb: float = 512,
    backups: str | os.PathLike[str] | None = None,
) -> list[BaseRoute]:
    """The pool's routes under `/pool/`, to put into any Starlette or FastAPI application.

    `authorize` raises `Unauthorized` where a request is refused; without it, requests need the `key`. `backups` is the
    folder below which callers may have backups made; without one they may not.
    """
    key = usable_key(key, name="key")
    authorized = authorize if authorize is not None else partial(_authorize, key=key)
    limit = int(max_body_mb * 1e6)

    async def call(request: Request) -> Response:
        body = await read_body(request, limit)
        try:
            data, error = await answer(pool, body, lambda: _disconnected(request), partial(backup_folder, backups))
        except CallerGone:
            return Response(status_code=499)
        return Response(data, STATUS.get(error.code, 500) if error else 200, media_type=FRAME_TYPE)

    async def stats(request: Request) -> Response:
        return _json(await pool.aio.stats(request.query_params.get("channel")))

    async def events(request: Request) -> Response:
        found = await pool.aio.events(_number(request, "cursor", 0), _number(request, "limit", 1000))
        return _json({"events": found, "next": found[-1].cursor + 1 if found else _number(request, "cursor", 0)})

    async def trajectory(request: Request) -> Response:
        found = await pool.aio.trajectory(request.path_params["uid"], request.query_params.get("channel"))
        return _json(found.to_dict())

    def listing(name: str) -> Handler:
        async def answer_rows(request: Request) -> Response:
            asked = request.query_params.items()
            filters: dict[str, Any] = {key: text if key in TEXTS else _value(text) for key, text in asked}
            channel = filters.pop("channel", DEFAULT_CHANNEL)
            rows: Callable[..., Awaitable[dict[str, Any]]] = getattr(pool.aio, f"list_{name}")
            return _json(await rows(channel, **filters))

        return answer_rows

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            try:
                authorized(request)
                return await handler(request)
            except HeadraceError as error:
                return _json({"detail": str(error), "code": error.code}, STATUS.get(error.code, 500))
            except BodyTooLarge:
                return _json({"detail": f"the body is larger than {max_body_mb:g} MB; send it in parts"}, 413)
            except ClientDisconnect:
                return Response(status_code=499)

        return guard

    return [
        Route("/pool/call", guarded(call), methods=["POST"]),
        Route("/pool/stats", guarded(stats)),
        Route("/pool/events", guarded(events)),
        Route("/pool/trajectories/{uid:path}", guarded(trajectory)),
        *(Route(f"/pool/{name}", guarded(listing(name))) for name in ("groups", "trajectories", "steps")),
    ]


def create_app(
    pool: DataPool,
    *,
    key: str | None = None,
    max_body_mb: float = 512,
    backups: str | os.PathLike[str] | None = None,
) -> Starlette:
    """A pool as a service of its own; the options are those of `pool_routes`."""
    key = usable_key(key, name="key")

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def root(request: Request) -> Response:
        if not wants_page(request):
            return _json({"message": "Headrace pool"})
        try:
            _authorize(request, key)
            numbers = channels(await pool.aio.stats())
        except Unauthorized:
            numbers = text("Channels", KEY_NEEDED)
        return Response(page("Pool", "Ready.", [numbers, links("Where to look", LINKS)]), media_type=KIND)

    routes = pool_routes(pool, key=key, max_body_mb=max_body_mb, backups=backups)
    return Starlette(routes=[Route("/", root), Route("/health", health), *routes])


class PoolServer(server.Server):
    """A pool's application on a socket: `app`, else one that `create_app` makes with the options. It closes the pool
    when it ends. Without a key and on loopback, it is for this machine's own programs alone."""

    def __init__(
        self,
        pool: DataPool,
        host: str = "127.0.0.1",
        port: int = 8200,
        *,
        app: ASGIApp | None = None,
        key: str | None = None,
        **options: Any,
    ) -> None:
        served: ASGIApp = create_app(pool, key=key, **options) if app is None else app
        if key is None and loopback(host):
            served = LocalOnly(served)
        super().__init__(served, host, port, closed=pool.close, lifespan=app is not None)
        self.pool = pool


def serve(
    pool: DataPool,
    host: str = "127.0.0.1",
    port: int = 8200,
    *,
    ready: Callable[[str], None] = lambda address: None,
    **options: Any,
) -> None:
    """Serves a pool until SIGTERM or SIGINT, then closes it; `options` are `create_app`'s."""
    PoolServer(pool, host, port, **options).run(ready)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _authorize(request: Request, key: str | None) -> None:
    if key is None:
        return
    if not hmac.compare_digest(presented_key(request), key.encode()):
        raise Unauthorized("this pool asks for its key, as `Authorization: Bearer KEY`")


def backup_folder(backups: str | os.PathLike[str] | None, to: str) -> str:
    """Where a backup goes that a caller wants in the folder `to`: somewhere below `backups`."""
    if backups is None:
        raise InvalidInput(
            "no backup is made over HTTP: this server was given no folder for backups; start it with --backups FOLDER"
        )
    allowed = os.path.realpath(backups)
    try:
        found = os.path.realpath(os.path.join(allowed, to))
    except ValueError as error:
        raise InvalidInput(f"no backup can be made in {shown(to)}: {error}") from None
    if found == allowed or os.path.commonpath([allowed, found]) != allowed:
        raise InvalidInput(
            f"no backup is made in {shown(to)}: over HTTP it goes below {allowed}; name a folder in there, as in "
            "before-the-upgrade"
        )
    return found


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise InvalidInput(f"{name} must be an integer of at least 0 and below 10^18, not {shown(value)}")
    return int(value)


def _value(text: str) -> Any:
    """A query parameter as what it looks like: true, false, a number, or text."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return found if isinstance(found, bool | int | float) else text
