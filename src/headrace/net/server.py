"""An application on a socket: the port is known before it is served, and ending is a return, not a signal.

The first SIGTERM or SIGINT lets what runs end; a second one ends it at once.
"""

from __future__ import annotations

import gc
import ipaddress
import resource
import socket
from collections.abc import Callable, Collection
from functools import lru_cache
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.net.connection import Connection

#: The GETs that change something, since they do on Atropos' wire.
CHANGED_BY_GET = ("/batch", "/reset_data")
#: The headers that tell where a request comes from.
TELLING_HEADERS = frozenset({b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode"})
#: Seconds that calls under way may take to end once a server is told to stop.
GRACE_S = 5
#: Digits of a `Content-Length` that are read as a number: none that any limit allows has more.
MAX_LENGTH_DIGITS = 18


class Server:
    """Serves an application. The port is bound when it is made, so `port=0` is known at once."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        closed: Callable[[], None] = lambda: None,
        lifespan: bool = False,
        grace_s: int | None = GRACE_S,
        shared: bool = False,
        connection: type[Connection] = Connection,
    ) -> None:
        """`closed` is called when the last request is answered, however serving ended. `lifespan`: the application has
        things to start and to end. `shared`: other processes listen on the same port; `private` is then an address of
        this one alone, on loopback."""
        self._closed = closed
        self._listener = listener(host, port, shared=shared)
        self.address = address_of(self._listener)
        self._private = listener("127.0.0.1", 0) if shared else None
        self.private = address_of(self._private) if self._private is not None else self.address
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=grace_s,
            ws="none",
            http=connection,
            lifespan="on" if lifespan else "off",
        )
        self._server = _Announcing(config)

    def run(self, ready: Callable[[str], None] = lambda address: None) -> None:
        """Serves until SIGTERM, SIGINT or `stop`. `ready` is told the address."""
        self._server.announce = lambda: ready(self.address)
        try:
            self._server.run([bound for bound in (self._listener, self._private) if bound is not None])
        finally:
            self._listener.close()
            if self._private is not None:
                self._private.close()
            self._closed()

    def stop(self) -> None:
        self._server.should_exit = True


class _Announcing(uvicorn.Server):
    announce: Callable[[], None] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets `run` return: uvicorn would raise the signal again, before everything is closed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.announce()


def listener(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket; with `shared`, one of several on the same port, among which the kernel spreads connections."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def usual_host(*, keyed: bool) -> str:
    """Where a server listens that was not told: everywhere where a key is asked for, else on this machine alone."""
    return "0.0.0.0" if keyed else "127.0.0.1"


class LocalOnly:
    """An application without keys, for callers on this machine that mean it: not for a web page of somebody's that
    the same machine's browser shows, whether it calls from its own origin or under a name that leads here.
    `origins` are those whose pages may."""

    def __init__(self, app: ASGIApp, origins: Collection[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := _foreign(scope, self._origins)) is not None:
            said = f"{why}, and this server has no key and is for this machine alone; set a key, or name --host"
            await JSONResponse({"detail": said}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _foreign(scope: Scope, origins: Collection[str]) -> str | None:
    """Why a request does not come from this machine's own programs; None where nothing speaks against it."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in TELLING_HEADERS}
    host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
    if host and not _names_this_machine(f"//{host}"):
        return f"the request names {host[:200]!r} as its host"
    if origin and origin not in origins and not _names_this_machine(origin):
        return f"the request comes from a page of {origin[:200]!r}"
    # Images and links have no origin, but browsers say that they come from elsewhere. A link may be followed to what is
    # only shown.
    elsewhere = not origin and headers.get(b"sec-fetch-site") == "cross-site"
    if elsewhere and (headers.get(b"sec-fetch-mode") != "navigate" or scope["path"] in CHANGED_BY_GET):
        return "the request comes from a page of another site"
    return None


@lru_cache(maxsize=256)  # callers are few, and each of their requests names it
def _names_this_machine(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return loopback(name) or name.endswith(".localhost")


def allow_files(wanted: int) -> int:
    """Lets this process open so many files, sockets among them, as far as the system allows; how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def settle_memory() -> None:
    """What is loaded by now stays: the garbage collector need not look through it again and again.

    With a tokenizer and its libraries in memory a full collection holds every caller up for a tenth of a second. What
    is made later is looked through a little at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)


def presented_key(request: Request) -> bytes:
    """The key that a request carries, as `Authorization: Bearer KEY` or `x-api-key: KEY`; nothing where it has none."""
    bearer = request.headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip().encode()
    return request.headers.get("x-api-key", "").strip().encode()


def header(request: Request, name: bytes) -> str | None:
    """The first header of a name, which is in lower case; None where there is none."""
    for key, value in request.scope["headers"]:
        if key == name:
            found: str = value.decode("latin-1")
            return found
    return None


class BodyTooLarge(Exception):
    """A request's body is larger than its route takes."""


async def read_body(
    request: Request, limit: int, expect: Callable[[int], None] = lambda size: None, *, free: int = 0
) -> bytes:
    """The body, refused as soon as it is known to be too large. `expect` is told how many bytes there has to be room
    for, before they are kept, and may raise; a body of up to `free` bytes needs none."""
    told = header(request, b"content-length") or ""
    length = 0
    if told.isdecimal():
        if len(told) > MAX_LENGTH_DIGITS or int(told) > limit:
            raise BodyTooLarge
        length = int(told)
    expected = max(length, free)  # what need not be asked for again
    if length > free:
        expect(length)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise BodyTooLarge
        if size > expected:
            expect(size - expected)
            expected = size
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
