"""Frames to a pool in another process: over HTTP, and over a unix socket. Ray's transport is in `headrace.pool.ray`."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import urllib.parse

import aiohttp
import orjson

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.pool.remote import Unreachable
from headrace.pool.wire import FRAME_TYPE


class HttpTransport:
    """Carries frames over HTTP, on kept connections: one a thread for blocking calls, aiohttp's for awaitable ones."""

    def __init__(self, address: str, key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"{address!r} is no pool's address; it looks like http://127.0.0.1:8200")
        self.address = address.rstrip("/")
        self._parts = parts
        self._path = parts.path.rstrip("/") + "/pool/call"
        self._headers = {"content-type": FRAME_TYPE, **({"authorization": f"Bearer {key}"} if key else {})}
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
        if kind == FRAME_TYPE:
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
