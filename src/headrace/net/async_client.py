"""The asynchronous HTTP client: any number of requests at once, on aiohttp.

Connections are opened when first needed, in the event loop that needs them, and kept for the next request; there are as
many as requests at once, which callers bound. Cancelling a request closes its connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson
from yarl import URL

from headrace.data.keys import usable_key
from headrace.net.http_answer import JSON_TYPE, MAX_ANSWER_BYTES, BadAddress, HttpAnswer, NoAnswer
from headrace.net.vanished import notice_vanished_peer

#: vLLM and uvicorn close a connection that was idle for 5 s; closed on this side first, none is used while it closes.
KEEP_ALIVE_S = 4.0
#: Headers that aiohttp would add of its own.
AIOHTTP_HEADERS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class HttpStream:
    """An answer that is being received: status and headers, and its body as it comes."""

    def __init__(self, client: AsyncHttpClient, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        #: In their order, names in lower case.
        self.headers = [(name.lower(), value) for name, value in response.headers.items()]
        self._client, self._response = client, response

    async def parts(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come; raises `NoAnswer` where it breaks off."""
        try:
            while part := await self._response.content.readany():
                yield part
        except (aiohttp.ClientError, OSError) as error:
            raise self._client.no_answer(error, self._response.url) from error


class AsyncHttpClient:
    """Requests to one server, by paths below its address, over a unix socket where `socket_path` names one; without an
    address, to any, by whole URLs.

    `total_s` bounds a request from its beginning to its answer's last byte, `connect_s` the connecting, `idle_s` each
    wait for bytes. `key` is sent as a bearer token, `headers` with every request. `max_bytes` None reads answers of any
    size. `verbatim` is for answers that are passed on: nothing is unpacked, no cookie kept, no redirect followed, and
    nothing said that the caller did not say. Raises `UnusableKey`.
    """

    def __init__(
        self,
        address: str = "",
        *,
        total_s: float | None,
        connect_s: float | None = None,
        idle_s: float | None = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        socket_path: str | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_bytes: int | None = MAX_ANSWER_BYTES,
        follow_redirects: bool = True,
        verbatim: bool = False,
    ) -> None:
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self.address = address.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=idle_s)
        key = usable_key(key, name=f"the key for {self.address}" if address else "the key")
        self._headers = {**(headers or {}), **({"authorization": f"Bearer {key}"} if key else {})}
        self._socket_path = socket_path
        self._keep_alive_s = keep_alive_s
        self._max_bytes = max_bytes
        self._follow_redirects = follow_redirects and not verbatim
        self._verbatim = verbatim

    def __del__(self) -> None:
        self.close_of_ended_loops()

    async def request(
        self,
        method: str,
        path: str | URL,
        body: bytes | None = None,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        total_s: float | None = None,
    ) -> HttpAnswer:
        """The answer, of whatever status, to a request with these bytes or with `json`; raises `NoAnswer`. `total_s`
        replaces the client's."""
        if json is not None:
            body, headers = orjson.dumps(json), {**(headers or {}), "content-type": JSON_TYPE}
        timeout = self._timeout if total_s is None else self._within(total_s)
        limit, parts, size = self._max_bytes, [], 0
        try:
            async with self._session().request(
                method,
                self._url(path),
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=self._follow_redirects,
            ) as response:
                while part := await response.content.readany():
                    parts.append(part)
                    size += len(part)
                    if limit is not None and size > limit:
                        response.close()
                        raise NoAnswer.too_large(*self._named(path), limit)
        except (aiohttp.ClientError, OSError) as error:
            raise self.no_answer(error, path, timeout) from error
        return HttpAnswer(response.status, response.headers, parts[0] if len(parts) == 1 else b"".join(parts))

    @asynccontextmanager
    async def stream(
        self, method: str, path: str | URL, body: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpStream]:
        """The answer to a request as it comes; raises `NoAnswer`. Leaving the block before its end closes the
        connection."""
        try:
            response = await self._session().request(
                method,
                self._url(path),
                data=body,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=self._follow_redirects,
            )
        except (aiohttp.ClientError, OSError) as error:
            raise self.no_answer(error, path) from error
        async with response:
            yield HttpStream(self, response)

    async def close(self) -> None:
        """Closes the running event loop's connections."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def close_of_ended_loops(self) -> None:
        """Closes the connections of event loops that have ended, such as each `asyncio.run`."""
        for loop in [loop for loop in self._sessions if loop.is_closed()]:
            # There is nothing to wait for without a loop: the first step is the last.
            with suppress(StopIteration):
                self._sessions.pop(loop).close().send(None)

    def no_answer(self, error: Exception, path: str | URL, timeout: aiohttp.ClientTimeout | None = None) -> NoAnswer:
        """What aiohttp raised, as ours."""
        timeout = timeout or self._timeout
        address, said = self._named(path)
        match error:
            case aiohttp.RedirectClientError():
                pass  # the address that is none is not the caller's
            case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
                return BadAddress.of(address)
            case aiohttp.ConnectionTimeoutError():
                why = f"no connection within {timeout.sock_connect or 0:g} s"
                return NoAnswer.unreachable(address, said, why, timed_out=True)
            case aiohttp.SocketTimeoutError():
                return NoAnswer.late(address, said, timeout.sock_read)
            case TimeoutError():
                return NoAnswer.late(address, said, timeout.total)
        return NoAnswer.unreachable(address, said, str(error) or type(error).__name__)

    def _url(self, path: str | URL) -> str | URL:
        return path if isinstance(path, URL) else self.address + path

    def _named(self, path: str | URL) -> tuple[str, str]:
        """The address and the path as messages name them: a whole URL is an address, without its query."""
        if self.address and isinstance(path, str):
            return self.address, path
        return str(path).partition("?")[0], ""

    def _within(self, total_s: float) -> aiohttp.ClientTimeout:
        known = self._timeout
        return aiohttp.ClientTimeout(total=total_s, sock_connect=known.sock_connect, sock_read=known.sock_read)

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            self.close_of_ended_loops()
            session = self._sessions[loop] = self._open()
        return session

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket_path is not None:
            connector = aiohttp.UnixConnector(self._socket_path, limit=0, keepalive_timeout=self._keep_alive_s)
        else:
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=self._keep_alive_s, socket_factory=_noticing_socket
            )
        if not self._verbatim:
            return aiohttp.ClientSession(connector=connector, headers=self._headers)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=AIOHTTP_HEADERS,
        )


def _noticing_socket(address: Any) -> socket.socket:
    """What aiohttp connects to an address as `getaddrinfo` tells it."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    notice_vanished_peer(made)
    return made
