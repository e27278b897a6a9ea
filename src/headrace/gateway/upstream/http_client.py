"""The HTTP/1.1 client for rollout servers: kept connections, answers as they come, server-sent events.

A general client spends more on a call than the gateway does on its tokens. This one writes a request in one piece, has
`httptools` (uvicorn's own parser) read the answer, and keeps the connection if the answer was read to its end; closing
an answer before that closes the connection, which is how a server learns that nobody listens. There are as many
connections as calls. Redirects are not followed and proxies are not used; certificates are checked against the system's
authorities, or those that `SSL_CERT_FILE` names.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable
from typing import Any

import httptools
import orjson
from yarl import URL

from headrace.gateway.upstream.errors import RolloutServerFailed
from headrace.gateway.upstream.flush_clock import Finish, FlushClock
from headrace.gateway.upstream.options import UpstreamOptions

#: Bytes of an answer that may wait to be read before the server is made to wait.
HIGH_WATER_BYTES = 1 << 17
#: Seconds from which on it pays to stop the socket while bytes are held, and read once at the end: below that, few
#: enough come meanwhile that to take each costs less.
PAUSED_HOLD_S = 0.1


class HttpError(Exception):
    """A connection or an answer failed."""


class ConnectFailed(HttpError):
    """No connection could be opened."""


class ConnectionDropped(HttpError):
    """The connection ended before the answer did."""


class NotHttp(HttpError):
    """What came is no HTTP answer."""


class HttpResponse:
    """An answer that is being received: status and headers first, its body as it comes, read by who waits for it
    (`readany`) or by a function that is told of it (`follow`)."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: _Connection | None = connection
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False
        self._clock: FlushClock | None = None  # which tells the follower
        self._follower: Callable[[], Finish | None] | None = None
        self._telling = False
        self._held_until = 0.0  # before, the follower is not told of bytes; 0: they are told as they come

    @property
    def content_length(self) -> int | None:
        """The body's length, where the server told it."""
        told = self.headers.get("content-length", "")
        return int(told) if told.isdecimal() else None

    async def begun(self) -> None:
        """Returns once status and headers are there."""
        if not self.status:
            await self._news()
        if not self.status:
            raise self._error or ConnectionDropped("the connection was closed without an answer")

    async def readable(self) -> None:
        """Returns once there is something to `take`: bytes, the end, or a failure."""
        while not (self._parts or self.over):
            await self._news()

    async def readany(self) -> bytes:
        """The bytes that have come and were not read yet, awaited where there are none; empty at the end."""
        await self.readable()
        return self.take()

    async def read(self) -> bytes:
        """The whole body."""
        self._wants_all = True
        if self._connection is not None:
            self._connection.flow(reading=True)  # so much may have come before this was asked that the server waits
        while not self._ended:
            if self._error is not None:
                raise self._error
            await self._news()
        return self.take()

    @property
    def over(self) -> bool:
        """Whether nothing more will come: it has ended, or failed."""
        return self._ended or self._error is not None

    def take(self) -> bytes:
        """The bytes that have come and were not read yet; empty where there are none. Raises why no more will come once
        all are read, unless that is the answer's end."""
        parts = self._parts
        if not parts:
            if self._error is not None:
                raise self._error
            return b""
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._size = 0
        if self._connection is not None:
            self._connection.flow(reading=True)
        return data

    def follow(self, clock: FlushClock, news: Callable[[], Finish | None]) -> None:
        """Has `news` called by the clock whenever there is something to `take`: bytes, the end, or a failure."""
        self._clock, self._follower = clock, news
        if self.over or (self._parts and not self._held_until):
            self._tell()

    def unfollow(self) -> None:
        """Tells nobody any more. Bytes are no longer held: a socket that was left unread for that is read again, until
        as many wait as may."""
        self._clock = self._follower = None
        held, self._held_until = self._held_until, 0.0
        if held and self._connection is not None and self._size < HIGH_WATER_BYTES:
            self._connection.flow(reading=True)

    def hold(self, clock: FlushClock, until: float, *, to_the_end: bool = False) -> None:
        """Tells who follows of no bytes before a time of the loop, unless the answer ends or `hurry` is called. Over a
        longer time the socket is left unread, so that an end is only seen after it, unless `to_the_end` says that one
        is near."""
        wait_s = until - asyncio.get_running_loop().time()
        if wait_s <= 0 or self.over:
            return
        self._held_until = until
        clock.call_at(until, self._end_hold)
        if wait_s >= PAUSED_HOLD_S and not to_the_end and self._connection is not None:
            self._connection.flow(reading=False)

    def hurry(self) -> None:
        """Ends the time for which bytes are left to gather."""
        if self._held_until and (finish := self._end_hold(self._held_until)) is not None:
            finish()

    def _end_hold(self, until: float) -> Finish | None:
        if until != self._held_until:
            return None  # one that was ended before its time
        self._held_until = 0.0
        if self._connection is not None:
            self._connection.flow(reading=True)
        return self._follower() if self._parts and self._follower is not None else None

    def close(self) -> None:
        """Lets go of the connection, which is closed unless the answer has ended."""
        connection, self._connection = self._connection, None
        self.unfollow()
        if connection is not None and not self._ended:
            connection.abort()

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _tell(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._clock is not None and not self._telling:
            self._telling = True  # not now: the parser may have more of the same bytes to tell of
            self._clock.call_soon(self._tell_follower)

    def _tell_follower(self) -> Finish | None:
        self._telling = False
        self._held_until = 0.0
        return self._follower() if self._follower is not None else None

    # Called by the connection.

    def head(self, status: int) -> None:
        """Takes the status; the headers are complete."""
        self.status = status
        self._tell()

    def body(self, data: bytes) -> bool:
        """Takes a part of the body; False where reading from the server should stop for a while."""
        self._parts.append(data)
        self._size += len(data)
        if not self._held_until and not self._wants_all:
            self._tell()
        return self._wants_all or self._size < HIGH_WATER_BYTES

    def end(self) -> None:
        """Notes that the body is complete."""
        self._ended = True
        self._connection = None
        self._tell()

    def fail(self, error: HttpError) -> None:
        """Notes why nothing more will come."""
        self._error = error
        self._connection = None
        self._tell()


class _Connection(asyncio.Protocol):
    """One connection: at most one request at a time."""

    def __init__(self, home: list[_Connection]) -> None:
        self._home = home  # where it waits for the next request
        self._transport: Any = None
        self._parser: Any = None
        self._response: HttpResponse | None = None
        self._reading = True
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> HttpResponse:
        self._response = response = HttpResponse(self)
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(data)
        return response

    def abort(self) -> None:
        self._response = None
        self._transport.abort()

    def flow(self, *, reading: bool) -> None:
        if reading != self._reading and self.usable:
            self._reading = reading
            self._transport.resume_reading() if reading else self._transport.pause_reading()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self._transport.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(NotHttp(f"what came is no HTTP: {error}"))
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._home:
            self._home.remove(self)
        self._lost(ConnectionDropped(str(error) if error is not None else "the connection was closed"))

    def _lost(self, error: HttpError) -> None:
        response, self._response = self._response, None
        if response is None:
            return
        lengthless = not {"content-length", "transfer-encoding"} & response.headers.keys()
        if isinstance(error, ConnectionDropped) and response.status and lengthless:
            response.end()  # an answer whose end is the connection's
        else:
            response.fail(error)

    # The parser's side.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None:
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._response is not None and status >= 200:
            self._response.head(status)

    def on_body(self, data: bytes) -> None:
        if self._response is not None and not self._response.body(data):
            self.flow(reading=False)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            return  # an interim answer: the real one follows
        keep = self._parser.should_keep_alive()
        self._response = None
        response.end()
        if keep and self.usable:
            self.flow(reading=True)
            self.idle_since = asyncio.get_running_loop().time()
            self._home.append(self)
        else:
            self._transport.close()


class HttpConnections:
    """Keep-alive connections to any number of servers, made and used in one event loop."""

    def __init__(self, headers: dict[str, str], *, connect_s: float, keep_alive_s: float) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._idle: dict[tuple[str, int, bool], list[_Connection]] = {}
        self._heads: dict[tuple[str, URL], bytes] = {}
        self._tls: ssl.SSLContext | None = None

    async def request(self, method: str, url: URL, body: bytes | None) -> HttpResponse:
        """Sends a request; returns once status and headers are there. A kept connection that the server had just closed
        is replaced, once."""
        data = b"".join((self._head(method, url), str(len(body or b"")).encode(), b"\r\n\r\n", body or b""))
        home = self._idle.setdefault(_origin(url), [])
        kept = self._kept(home)
        if kept is not None:
            response = kept.send(data)
            try:
                await self._begun(response)
                return response
            except ConnectionDropped:
                pass
        response = (await self._connected(url, home)).send(data)
        await self._begun(response)
        return response

    def close(self) -> None:
        """Closes the connections that are idle."""
        for home in self._idle.values():
            for connection in list(home):
                connection.abort()
            home.clear()

    async def _begun(self, response: HttpResponse) -> None:
        try:
            await response.begun()
        except BaseException:
            response.close()
            raise

    def _kept(self, home: list[_Connection]) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while home:
            connection = home.pop()
            if connection.usable and now - connection.idle_since < self._keep_alive_s:
                return connection
            connection.abort()
        return None

    async def _connected(self, url: URL, home: list[_Connection]) -> _Connection:
        if url.scheme == "https" and self._tls is None:
            self._tls = ssl.create_default_context()
        tls = self._tls if url.scheme == "https" else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(home), url.host or "", url.port or 0, ssl=tls
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection to {url.host}:{url.port} within {self._connect_s:g} s") from None
        except (OSError, ValueError) as error:  # ValueError: a name that no host can have
            said = getattr(error, "strerror", None) or error
            raise ConnectFailed(f"no connection to {url.host}:{url.port}: {said}") from error
        return connection

    def _head(self, method: str, url: URL) -> bytes:
        known = self._heads.get((method, url))
        if known is None:
            host = url.authority.rpartition("@")[2]
            lines = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {host}\r\n{self._headers}Content-Length: "
            known = self._heads[method, url] = lines.encode("latin-1")
        return known


def _origin(url: URL) -> tuple[str, int, bool]:
    return url.host or "", url.port or 0, url.scheme == "https"


#: vLLM and uvicorn close a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0
#: Bytes that are read at most of an error's or a control route's answer.
CONTROL_ANSWER_BYTES = 1 << 20


class AnswerTooLarge(Exception):
    """An answer has more bytes than are allowed."""


class UpstreamClient:
    """The client for all rollout servers of one `Upstream`. Made in the event loop that it is used in."""

    def __init__(self, options: UpstreamOptions) -> None:
        headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "headrace"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._http = HttpConnections(headers, connect_s=options.connect_s, keep_alive_s=KEEP_ALIVE_S)

    async def post(self, url: URL, body: bytes | None) -> HttpResponse:
        """Sends a body; returns once the answer's status and headers are there. Raises `HttpError`s."""
        return await self._http.request("POST", url, body)

    async def ask(self, method: str, url: URL, body: Any, within_s: float) -> tuple[int, bytes]:
        """One small request: its answer's status and body; `RolloutServerFailed` where there is none in time."""
        response: HttpResponse | None = None
        try:
            async with asyncio.timeout(within_s):
                data = None if body is None else orjson.dumps(body)
                response = await self._http.request(method, url, data)
                return response.status, await read_up_to(response, CONTROL_ANSWER_BYTES)
        except (ConnectFailed, ConnectionDropped) as error:
            raise RolloutServerFailed(why_unreachable(error), "unreachable") from error
        except TimeoutError:
            raise RolloutServerFailed(f"{url.path} did not answer within {within_s:g} s", "hang") from None
        except AnswerTooLarge as error:
            raise RolloutServerFailed(f"{url.path} gives {error}", "too_large") from error
        except HttpError as error:
            raise RolloutServerFailed(f"{url.path} does not speak HTTP as it should: {error}", "malformed") from error
        finally:
            if response is not None:
                response.close()

    async def close(self) -> None:
        """Closes the connections that are idle."""
        self._http.close()


async def read_up_to(response: HttpResponse, limit: int) -> bytes:
    """The whole body; `AnswerTooLarge` where it has more than `limit` bytes."""
    told = response.content_length
    if told is not None and told <= limit:
        return await response.read()
    if told is not None:
        raise AnswerTooLarge(f"an answer of {told} bytes, more than the {limit} allowed")
    parts, size = [], 0
    while part := await response.readany():
        size += len(part)
        if size > limit:
            raise AnswerTooLarge(f"an answer of more than the {limit} bytes allowed")
        parts.append(part)
    return b"".join(parts)


def why_unreachable(error: BaseException) -> str:
    """Why there is no connection, as short as can be."""
    # A name with several addresses fails with one error that quotes those of each.
    if f"[Errno {errno.ECONNREFUSED}]" in str(error.__cause__):
        return "connection refused"
    return f"the connection failed: {error_text(error)}"


def error_text(error: BaseException) -> str:
    """An error's message; its type's name where it has none."""
    return str(error) or type(error).__name__


class SseDecoder:
    """Server-sent events out of bytes: any chunking gives the same events.

    Only `data` is kept; comments (keep-alives) and other fields are passed over."""

    __slots__ = ("_data", "_held")

    def __init__(self) -> None:
        #: Pieces of a line whose end has not come.
        self._held: list[bytes] = []
        #: Lines of an event whose end has not come.
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that became whole with these bytes."""
        if not self._held and not self._data and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"):
            events = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(events) and b"\r" not in chunk:
                return events  # whole events of one line each, which is how servers send them
        last = chunk.rfind(b"\n") + 1
        if not last:
            self._held.append(chunk)
            return []
        whole = chunk[:last]
        if self._held:
            self._held.append(whole)
            whole = b"".join(self._held)
            self._held = []
        if last < len(chunk):
            self._held.append(chunk[last:])
        found, data = [], self._data
        for line in whole[:-1].split(b"\n"):
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and data:
                found.append(data[0] if len(data) == 1 else b"\n".join(data))
                data.clear()
        return found
