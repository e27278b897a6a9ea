"""The blocking HTTP client: one server, any number of threads, on the standard library's `http.client`.

A request waits until it is answered or a wait for the network takes longer than its time-out. It cannot be cancelled:
whoever must be able to stop makes it in a daemon thread and stops waiting (`headrace.trainer.stopping`).
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any

import orjson

from headrace.data.keys import usable_key
from headrace.net.http_answer import JSON_TYPE, MAX_ANSWER_BYTES, HttpAnswer, NoAnswer, split_address
from headrace.net.vanished import notice_vanished_peer

#: Bytes that are read at a time of an answer that does not tell its length.
READ_BYTES = 1 << 20


class BlockingHttpClient:
    """Requests to one server, by paths below its address, over a unix socket where `socket_path` names one.

    `timeout_s` bounds connecting and each wait for bytes; a server whose machine is gone is noticed before that, in a
    minute and a half. `key` is sent as a bearer token. Raises `BadAddress`, and `UnusableKey`.

    With `keep_alive`, each thread keeps its connection for its next request, and a request that fails on a kept
    connection, which the server may have closed meanwhile, is made once more on a new one: it is for requests that may
    arrive twice. One whose time is over is not made again. `max_bytes` None reads answers of any size. Redirects are
    not followed.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        key: str | None = None,
        socket_path: str | None = None,
        keep_alive: bool = False,
        max_bytes: int | None = MAX_ANSWER_BYTES,
    ) -> None:
        parts = split_address(address)
        self.address = address.rstrip("/")
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        key = usable_key(key, name=f"the key for {self.address}")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout_s = timeout_s
        self._socket_path = socket_path
        self._keep_alive = keep_alive
        self._max_bytes = max_bytes
        self._kept = threading.local()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """The answer, of whatever status, to a request with these bytes or with `json`; raises `NoAnswer`."""
        sent = {**self._headers, **headers} if headers is not None else dict(self._headers)
        if json is not None:
            body = orjson.dumps(json)
            sent["content-type"] = JSON_TYPE
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        kept = self._take_kept(timeout_s)
        try:
            if kept is not None:
                try:
                    return self._exchange(kept, method, path, body, sent)
                except (OSError, http.client.HTTPException) as error:
                    if _is_late(error):  # the server is there: a new connection would only wait as long again
                        raise
            return self._exchange(self._new(timeout_s), method, path, body, sent)
        except (OSError, http.client.HTTPException) as error:
            if _is_late(error):
                raise NoAnswer.late(self.address, path, timeout_s) from error
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise NoAnswer.unreachable(self.address, path, why) from error

    def close(self) -> None:
        """Closes the connection that this thread keeps."""
        kept = self._take_kept(self._timeout_s)
        if kept is not None:
            kept.close()

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, sent: dict[str, str]
    ) -> HttpAnswer:
        try:
            if connection.sock is None:
                connection.connect()
                assert connection.sock is not None
                notice_vanished_peer(connection.sock)
            connection.request(method, self._prefix + path, body, sent)
            response = connection.getresponse()
            answer = HttpAnswer(response.status, response.headers, self._read(response, path))
        except BaseException:
            connection.close()
            raise
        if self._keep_alive:
            self._kept.connection = connection
        else:
            connection.close()
        return answer

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        limit, told = self._max_bytes, response.length
        if limit is None or (told is not None and told <= limit):
            return response.read()
        parts: list[bytes] = []
        size = told or 0
        while size <= limit:
            part = response.read(READ_BYTES)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
        raise NoAnswer.too_large(self.address, path, limit)

    def _take_kept(self, timeout_s: float) -> http.client.HTTPConnection | None:
        """The connection that this thread keeps, for the next request alone."""
        kept: http.client.HTTPConnection | None = getattr(self._kept, "connection", None)
        self._kept.connection = None
        if kept is None or kept.sock is None:  # the last answer said that it would be closed
            return None
        kept.sock.settimeout(timeout_s)
        return kept

    def _new(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._socket_path is not None:
            return _UnixConnection(self._socket_path, timeout_s)
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


def _is_late(error: Exception) -> bool:
    """Whether the time for a wait was over. The same class, with a number, tells that the kernel gave a peer up."""
    return isinstance(error, TimeoutError) and error.errno is None


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("unix", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
