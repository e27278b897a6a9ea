"""The pool over HTTP: routes to mount, an application of its own, and the client's transport.

`POST /pool/call` takes and answers frames (see `wire`); that is what `connect("http://...")` speaks. The `GET` routes
answer JSON, for people and scripts. With a key, every route but `/health` and the front page asks for it, as
`Authorization: Bearer` or `x-api-key`.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import os
import socket
import threading
import urllib.parse
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from headrace import serving
from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.data.json import to_json
from headrace.front_page import KEY_NEEDED, KIND, channels, links, page, text, wants_page
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Unauthorized
from headrace.pool.remote import RemotePool, Unreachable
from headrace.pool.service import CallerGone, answer
from headrace.serving import BodyTooLarge, LocalOnly, loopback, presented_key, read_body

FRAME = "application/vnd.headrace.frame"
STATUS = {
    "invalid_input": 422,
    "bad_frame": 400,
    "conflict": 409,
    "not_found": 404,
    "gone": 404,
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

    `authorize` raises `Unauthorized` for who may not; without it, whoever has the `key` may. `backups` is the folder
    below which callers may have backups made; without one they may not.
    """
    authorized = authorize if authorize is not None else partial(_authorize, key=key)
    limit = int(max_body_mb * 1e6)

    async def call(request: Request) -> Response:
        body = await read_body(request, limit)
        try:
            data, error = await answer(pool, body, lambda: _disconnected(request), partial(_below, backups))
        except CallerGone:
            return Response(status_code=499)
        return Response(data, STATUS.get(error.code, 500) if error else 200, media_type=FRAME)

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


class Server(serving.Server):
    """A pool's application on a socket. It closes the pool when it ends. Without a key and on loopback, it is for this
    machine's own programs alone."""

    def __init__(self, pool: DataPool, host: str = "127.0.0.1", port: int = 8200, **options: Any) -> None:
        app: ASGIApp = create_app(pool, **options)
        if options.get("key") is None and loopback(host):
            app = LocalOnly(app)
        super().__init__(app, host, port, closed=pool.close)
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
    Server(pool, host, port, **options).run(ready)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _authorize(request: Request, key: str | None) -> None:
    if key is None:
        return
    if not hmac.compare_digest(presented_key(request), key.encode()):
        raise Unauthorized("this pool asks for its key, as `Authorization: Bearer KEY`")


def _below(backups: str | os.PathLike[str] | None, to: str) -> str:
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


class HttpTransport:
    """Carries frames over HTTP, on kept connections: one a thread for blocking calls, aiohttp's for awaitable ones."""

    def __init__(self, address: str, key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{address!r} is no pool's address; it looks like http://127.0.0.1:8200")
        self.address = address.rstrip("/")
        self._parts = parts
        self._path = parts.path.rstrip("/") + "/pool/call"
        self._headers = {"content-type": FRAME, **({"authorization": f"Bearer {key}"} if key else {})}
        self._local = threading.local()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        for fresh in (False, True):
            connection, reused = self._connection(timeout)
            try:
                connection.request("POST", self._path, body, self._headers)
                response = connection.getresponse()
                return self._checked(response.status, response.headers.get("content-type"), response.read())
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._local.connection = None
                # A kept-alive connection that the server closed meanwhile says nothing about the server.
                if fresh or not reused:
                    raise Unreachable(f"{type(error).__name__}: {error}") from error
        raise AssertionError("unreachable")

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            return connection, True
        connection = self._local.connection = self._connect(timeout)
        return connection, False

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname
        return kind(self._parts.hostname, self._parts.port, timeout=timeout)

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        try:
            limit = aiohttp.ClientTimeout(total=timeout)
            url = f"{self._parts.scheme}://{self._parts.netloc}{self._path}"
            async with self._session().post(url, data=body, headers=self._headers, timeout=limit) as response:
                return self._checked(response.status, response.headers.get("content-type"), await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            for other in [old for old in self._sessions if old.is_closed()]:
                del self._sessions[other]
            session = self._sessions[loop] = aiohttp.ClientSession(connector=self._connector(), auto_decompress=True)
        return session

    def _connector(self) -> aiohttp.BaseConnector:
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=60)

    def _checked(self, status: int, kind: str | None, data: bytes) -> bytes:
        if kind == FRAME:
            return data
        try:
            said = orjson.loads(data)
            raise HeadraceError.from_wire(said.get("code", "error"), str(said.get("detail", said)))
        except (orjson.JSONDecodeError, AttributeError):
            raise Unreachable(f"HTTP {status} from {self.address}, which does not answer as a pool does") from None

    def close(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    async def aclose(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


class UnixTransport(HttpTransport):
    """The same over a unix socket: processes of one machine, and nobody else."""

    def __init__(self, path: str) -> None:
        super().__init__("http://unix")
        self.address = f"unix://{path}"
        self._socket = path

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        return _UnixConnection(self._socket, timeout)

    def _connector(self) -> aiohttp.BaseConnector:
        return aiohttp.UnixConnector(self._socket, limit=0, keepalive_timeout=60)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("unix", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
