"""The dashboard over HTTP: plain routes below one path. All that is a GET only reads."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from headrace.dashboard.about import About
from headrace.dashboard.curation import CurationRequest
from headrace.dashboard.dashboard import ONLY_READS, Dashboard
from headrace.dashboard.detail import MAX_TOKENS
from headrace.dashboard.exports import check_format
from headrace.dashboard.live import LiveFigures
from headrace.dashboard.login import REQUEST_HEADER, DashboardLogin, same_origin
from headrace.dashboard.records import MAX_ROWS, TrajectoryQuery
from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.net.connection import stopping
from headrace.net.server import BodyTooLarge, read_body
from headrace.pool.errors import Gone, NotFound

Handler = Callable[[Request], Awaitable[Response]]
Decoded = TypeVar("Decoded")

PATH = "/dashboard"
#: Bytes of a login, and of a change by hand.
MAX_LOGIN, MAX_CHANGE = 4096, 100_000

#: Scripts and styles of this package alone; no frame, no form that leads elsewhere, no inline code.
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
#: The files of the page, and what each is.
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class DashboardRoutes:
    """The routes of one dashboard. `closing` is to be awaited at the end."""

    def __init__(self, dashboard: Dashboard, login: DashboardLogin) -> None:
        self._dashboard, self._login = dashboard, login
        self._live = LiveFigures(dashboard.overview)
        self._files = _static_files()

    @property
    def routes(self) -> list[BaseRoute]:
        """The routes, for an application to put before its own."""
        views: dict[str, Handler] = {
            "overview": self.overview,
            "about": self.about,
            "curves": self.curves,
            "survivors": self.survivors,
            "choices": self.choices,
            "trajectories": self.trajectories,
            "groups": self.groups,
            "group": self.group,
            "trajectory": self.trajectory,
            "conversation": self.conversation,
            "tokens": self.tokens,
            "consumption": self.consumption,
            "why": self.why,
            "search": self.search,
            "comparison": self.comparison,
            "answers": self.answers,
            "export": self.export,
            "live": self.live,
        }
        routes: list[BaseRoute] = [
            Route(f"{PATH}/api/{name}", self._guarded(view), methods=["GET"]) for name, view in views.items()
        ]
        routes.append(Route(f"{PATH}/api/login", self._changes(self.log_in), methods=["POST"]))
        routes.append(Route(f"{PATH}/api/logout", self._changes(self.log_out), methods=["POST"]))
        for name, handler in (("curate", self.curate), ("undo", self.undo)):
            changing = self._guarded(self._changes(self._editing(handler)))
            routes.append(Route(f"{PATH}/api/{name}", changing, methods=["POST"]))
        routes.append(Route(PATH, _to_page, methods=["GET"]))
        routes.append(Route(f"{PATH}/{{name:path}}", self.file, methods=["GET"]))
        return routes

    async def closing(self) -> None:
        """Ends what goes on by itself."""
        await self._live.close()
        await self._dashboard.close()

    # -- the page ------------------------------------------------------------------------------------------------------

    async def file(self, request: Request) -> Response:
        """A file of the page. Without a key: it holds nothing of anybody's."""
        found = self._files.get(request.path_params["name"] or "index.html")
        if found is None:
            return _error(404, "there is no such file")
        body, kind, tag = found
        headers = {**SECURITY_HEADERS, "etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    # -- login ---------------------------------------------------------------------------------------------------------

    async def log_in(self, request: Request) -> Response:
        if self._login.closed is not None:
            return _error(403, self._login.closed)
        if self._login.exhausted:
            return _error(429, "too many wrong keys; try again in a minute")
        try:
            given = orjson.loads(await read_body(request, MAX_LOGIN))
        except (orjson.JSONDecodeError, BodyTooLarge):
            given = None
        key = given.get("key") if isinstance(given, dict) else None
        if not isinstance(key, str):
            return _error(400, "the body must be an object with the key, as text, in `key`")
        if not self._login.opens(key):
            return _error(401, "this is not the key")
        response = _json({})
        self._login.admit(request, response)
        return response

    async def log_out(self, request: Request) -> Response:
        response = _json({})
        self._login.dismiss(response)
        return response

    # -- views ---------------------------------------------------------------------------------------------------------

    async def overview(self, request: Request) -> Response:
        return _json(await self._dashboard.overview())

    async def about(self, request: Request) -> Response:
        return _json(await self._dashboard.about() or About("", ""))

    async def curves(self, request: Request) -> Response:
        return _json(await self._dashboard.curves())

    async def survivors(self, request: Request) -> Response:
        return _json(await self._dashboard.survivors())

    async def choices(self, request: Request) -> Response:
        return _json({**await self._dashboard.choices(), "keyed": self._login.keyed})

    async def trajectories(self, request: Request) -> Response:
        return _json(await self._dashboard.trajectories(_query(request)))

    async def groups(self, request: Request) -> Response:
        limit = _limit(request, 20)
        asked = request.query_params
        found = await self._dashboard.groups(
            asked.get("channel") or None, asked.get("find", ""), _whole(request, "offset", 0), limit
        )
        return _json(found)

    async def group(self, request: Request) -> Response:
        return _json(await self._dashboard.group(*_named(request)))

    async def trajectory(self, request: Request) -> Response:
        return _json(await self._dashboard.trajectory(*_named(request), _whole(request, "offset", 0)))

    async def conversation(self, request: Request) -> Response:
        return _json(await self._dashboard.conversation(*_named(request), _whole(request, "leaf", 0)))

    async def tokens(self, request: Request) -> Response:
        offset = _whole(request, "offset", 0) if "offset" in request.query_params else None
        found = await self._dashboard.tokens(
            *_named(request), _whole(request, "step", 0), offset, min(_whole(request, "limit", 500), MAX_TOKENS)
        )
        return _json(found)

    async def consumption(self, request: Request) -> Response:
        return _json(await self._dashboard.consumption(_whole(request, "offset", 0), _limit(request, 50)))

    async def why(self, request: Request) -> Response:
        name = request.query_params.get("name")
        if not name:
            raise InvalidInput(
                "name what is asked about: ?name=..., a trajectory, a call, a prompt, a lease or a batch"
            )
        return _json(await self._dashboard.why(name, request.query_params.get("channel") or None))

    async def search(self, request: Request) -> Response:
        text = request.query_params.get("text", "")
        return _json(await self._dashboard.search(_query(request, but=("text",)), text))

    async def comparison(self, request: Request) -> Response:
        return _json(await self._dashboard.comparison(_whole(request, "offset", 0), _limit(request, 50)))

    async def answers(self, request: Request) -> Response:
        prompt = request.query_params.get("prompt_uid")
        if not prompt:
            raise InvalidInput("name the prompt: ?prompt_uid=...")
        return _json(await self._dashboard.answers(prompt))

    async def export(self, request: Request) -> Response:
        """What a filter shows, as a file to keep: it is written whole, then sent, then removed."""
        what = check_format(request.query_params.get("format", ""))
        query = _query(request, but=("format",))
        suffix = ".parquet" if what.endswith(".parquet") else ".jsonl"
        folder = await run_in_threadpool(mkdtemp, prefix="headrace-export-")
        path = Path(folder) / f"export{suffix}"
        try:
            done = await self._dashboard.export(query, what, path)
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
        counts = "; ".join(f"{name}={count}" for name, count in msgspec.to_builtins(done).items())
        name = f"headrace-{what.removesuffix(suffix)}{suffix}"
        return FileResponse(
            path,
            media_type="application/octet-stream",
            filename=name,
            headers={**SECURITY_HEADERS, "cache-control": "no-store", "x-headrace-export": counts},
            background=BackgroundTask(rmtree, folder, ignore_errors=True),
        )

    async def live(self, request: Request) -> Response:
        if self._live.full:
            return _error(503, "too many pages are open")
        headers = {**SECURITY_HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        events = self._live.listen(partial(stopping, request.scope))
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    # -- changes -------------------------------------------------------------------------------------------------------

    async def curate(self, request: Request) -> Response:
        asked = _decoded(await _body(request), CurationRequest)
        query = None if asked.filter is None else _query_of(asked.filter)
        return _json(await self._dashboard.curate(asked, query))

    async def undo(self, request: Request) -> Response:
        return _json(await self._dashboard.undo(_decoded(await _body(request), UndoRequest).by))

    # -- guards --------------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            if not self._login.admits(request):
                return _error(401, self._login.closed or "log in first")
            if not same_origin(request):
                return _error(403, "the request comes from a page of another site")
            try:
                return await handler(request)
            except InvalidInput as error:
                return _error(400, str(error))
            except (Gone, NotFound) as error:
                return _error(404, str(error))
            except HeadraceError as error:
                return _error(503, str(error))

        return guarded

    def _changes(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            if not same_origin(request) or REQUEST_HEADER not in request.headers:
                return _error(403, f"only the dashboard's own page may ask this (it sends {REQUEST_HEADER})")
            return await handler(request)

        return checked

    def _editing(self, handler: Handler) -> Handler:
        async def edited(request: Request) -> Response:
            if not self._dashboard.source.editable:
                return _error(403, ONLY_READS)
            return await handler(request)

        return edited


def add_dashboard(app: Starlette, dashboard: Dashboard, login: DashboardLogin) -> None:
    """Puts a dashboard before the routes of an application, and ends it before what the application itself ends."""
    served = DashboardRoutes(dashboard, login)
    app.router.routes[:0] = served.routes
    others = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[Any]:
        async with others(app) as state:
            try:
                yield state
            finally:
                await served.closing()

    app.router.lifespan_context = lifespan


def dashboard_app(dashboard: Dashboard, login: DashboardLogin) -> Starlette:
    """An application that serves a dashboard and nothing else. Its root leads to the page."""
    app = Starlette(routes=[Route("/", _to_page)])
    add_dashboard(app, dashboard, login)
    return app


async def _to_page(request: Request) -> Response:
    return RedirectResponse(f"{PATH}/", headers=SECURITY_HEADERS)


class UndoRequest(msgspec.Struct, frozen=True):
    """`by` is who takes the last change back."""

    by: str = ""


async def _body(request: Request) -> bytes:
    try:
        return await read_body(request, MAX_CHANGE)
    except BodyTooLarge:
        raise InvalidInput(f"the body is larger than {MAX_CHANGE} bytes") from None


def _decoded(body: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the body is wrong: {error}") from None


def _query(request: Request, but: Collection[str] = ()) -> TrajectoryQuery:
    return _query_of({name: value for name, value in request.query_params.items() if name not in but})


def _query_of(fields: Mapping[str, str]) -> TrajectoryQuery:
    given = {name: value for name, value in fields.items() if value != ""}
    try:
        return msgspec.convert(given, TrajectoryQuery, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the filter is wrong: {error}") from None


def _named(request: Request) -> tuple[str, str]:
    found = [request.query_params.get(name) for name in ("channel", "uid")]
    if not all(found):
        raise InvalidInput("name the trajectory: ?channel=...&uid=...")
    return found[0] or "", found[1] or ""


def _whole(request: Request, name: str, usual: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return usual
    if not (given.isascii() and given.isdecimal() and len(given) <= 9):
        raise InvalidInput(f"{name} is {shown(given)}; it must be a whole number")
    return int(given)


def _limit(request: Request, usual: int) -> int:
    found = _whole(request, "limit", usual)
    if not 1 <= found <= MAX_ROWS:
        raise InvalidInput(f"limit is {found}; it is a number of rows, from 1 to {MAX_ROWS}")
    return found


def _json(value: Any) -> Response:
    return Response(
        msgspec.json.encode(value),
        media_type="application/json",
        headers={**SECURITY_HEADERS, "cache-control": "no-store"},
    )


def _error(status: int, words: str | None) -> Response:
    return JSONResponse({"detail": words}, status, headers={**SECURITY_HEADERS, "cache-control": "no-store"})


def _static_files() -> dict[str, tuple[bytes, str, str]]:
    """Every file of the page by its path, with its kind and its tag: a few hundred kilobytes."""
    found = {}
    folder = resources.files("headrace.dashboard") / "static"
    for prefix, place in (("", folder), ("vendor/", folder / "vendor")):
        for file in place.iterdir():
            kind = KINDS.get("." + file.name.rpartition(".")[2])
            if file.is_file() and kind is not None:
                body = file.read_bytes()
                found[prefix + file.name] = (body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found
