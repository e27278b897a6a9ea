"""Connections of clients that send too much, too slowly, or nothing; and what a server knows of what it wrote."""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from tests.gateway.kit import serving

from headrace.net import connection
from headrace.net.connection import (
    BODY_S,
    HEAD_BYTES,
    Connection,
    delivered,
    flushed,
    stopping,
)
from headrace.net.server import LocalOnly

PATIENCE_S = 120
LARGE = 30_000_000


class App:
    """Reads a request's body and says how long it was; `/large` answers with as much as no socket's buffer holds."""

    def __init__(self) -> None:
        self.arrived: list[bool] = []
        self.told = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        body = b"x" * LARGE if scope["path"] == "/large" else json.dumps(size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
        self.arrived.append(await flushed(scope))
        self.told.set()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def address(app: App) -> Iterator[str]:
    with serving(app, lifespan=False) as found:
        yield found


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as found:
        yield found


def rest(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass  # it hung up while we were still sending
    return b"".join(parts)


class LateBody:
    """Sends a head that tells a length, and the body once `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await asyncio.get_running_loop().run_in_executor(None, self.go.wait, PATIENCE_S)
        await send({"type": "http.response.body", "body": b"la", "more_body": True})
        await send({"type": "http.response.body", "body": b"te"})


def test_a_head_does_not_wait_for_a_body_that_comes_late() -> None:
    app = LateBody()
    with serving(app, lifespan=False) as address, connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1 << 16)
        assert head.startswith(b"HTTP/1.1 200 ")
        app.go.set()
        assert (head + rest(connection)).endswith(b"\r\n\r\nlate")


class Sizes:
    """Answers with as many bytes as the path says."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b"x" * int(scope["path"][1:])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def test_answers_of_any_size_come_whole_on_one_connection() -> None:
    most = connection.JOINED_BODY_BYTES
    with serving(Sizes(), lifespan=False) as address, httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        for size in (0, 1, 1000, most, most + 1, 3 * most):
            assert client.get(f"{address}/{size}").content == b"x" * size
            assert client.head(f"{address}/{size}").headers["content-length"] == str(size)


def test_a_request_leaves_nothing_to_the_garbage_collector() -> None:
    cycles: list[weakref.ref[Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        cycles.append(weakref.ref(getattr(send, "__self__")))  # noqa: B009 - a bound method, which the types do not say
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        assert await delivered(scope)

    gc.disable()
    try:
        with serving(app, lifespan=False) as address, httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
            for _ in range(4):
                assert client.get(address).text == "ok"
            gone = [cycle() is None for cycle in cycles[:3]]
    finally:
        gc.enable()
    assert gone == [True] * 3


def test_a_head_that_never_ends_is_refused_once_it_is_too_long(address: str) -> None:
    with connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx-long: ")
        try:
            for _ in range(HEAD_BYTES // 1024 * 64):
                connection.sendall(b"x" * 1024)
        except (BrokenPipeError, ConnectionResetError):
            pass
        found = rest(connection)
    assert found == b"" or found.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(address, timeout=PATIENCE_S, trust_env=False).status_code == 200


def test_many_headers_that_fit_are_taken(address: str) -> None:
    headers = {f"x-{n}": "y" * 1000 for n in range(30)}
    answer = httpx.post(address, headers=headers, content=b"z" * 300_000, timeout=PATIENCE_S, trust_env=False)
    assert answer.json() == 300_000


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET / HTTP/1.1\r\nx: ", b"HTTP/1.1 408 "),
        (b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\nhalf", b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_who_does_not_go_on_is_hung_up_on(
    app: App, sent: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = bytearray()
    data_received, look = Connection.data_received, Connection._look

    def received(self: Connection, data: bytes) -> None:
        came.extend(data)
        data_received(self, data)

    def look_once_all_came(self: Connection) -> None:
        if came == sent:
            look(self)
        else:  # the server is late, not who sends
            self._timer = self.loop.call_later(0.01, self._look)

    monkeypatch.setattr(Connection, "data_received", received)
    monkeypatch.setattr(Connection, "_look", look_once_all_came)
    monkeypatch.setattr(Connection, "head_s", 0.05)
    monkeypatch.setattr(Connection, "body_s", 0.05)
    with serving(app, lifespan=False) as address, connected(address) as connection:
        connection.sendall(sent)
        assert rest(connection)[: len(answer)] == answer


@pytest.mark.parametrize(
    ("request_head", "sent"),
    [
        (b"POST /2 HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n", b"later"),
        (b"GET /2 HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\r\n\r\n"),
    ],
    ids=["the body of what was answered", "line ends"],
)
def test_who_sends_something_behind_an_answer_and_asks_nothing_is_hung_up_on_silently(
    request_head: bytes, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited: queue.Queue[tuple[Connection, str]] = queue.Queue()
    awaits = Connection._awaits

    def told(self: Connection, what: Literal["head", "body"], within_s: float) -> None:
        awaits(self, what, within_s)
        self.timeout_keep_alive = PATIENCE_S  # by which it is not to be closed here
        awaited.put((self, what))

    def overdue(held: Connection) -> None:
        held._deadline = held.loop.time()
        held._timer.cancel()
        held._look()

    monkeypatch.setattr(Connection, "_awaits", told)
    with serving(Sizes(), lifespan=False) as address, connected(address) as connection:
        connection.sendall(request_head)
        answer = b""
        while not answer.endswith(b"\r\n\r\nxx"):
            answer += connection.recv(1 << 16)
        while not awaited.empty():
            awaited.get()
        connection.sendall(sent)
        held, what = awaited.get(timeout=PATIENCE_S)
        while what != "head":
            held, what = awaited.get(timeout=PATIENCE_S)
        held.loop.call_soon_threadsafe(overdue, held)
        assert rest(connection) == b""


def test_every_part_of_a_body_gives_the_next_one_its_time_again(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly they come: what counts is that something comes."""
    awaited: queue.Queue[tuple[str, float]] = queue.Queue()
    awaits = Connection._awaits

    def told(self: Connection, what: Literal["head", "body"], within_s: float) -> None:
        awaits(self, what, within_s)
        awaited.put((what, within_s))

    monkeypatch.setattr(Connection, "_awaits", told)
    with serving(app, lifespan=False) as address, connected(address) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\ncontent-length: 5\r\nconnection: close\r\n\r\n")
        while awaited.get(timeout=PATIENCE_S) != ("body", BODY_S):
            pass
        for _ in range(5):
            connection.sendall(b"x")
            assert awaited.get(timeout=PATIENCE_S) == ("body", BODY_S)
        assert b"\r\n5\r\n" in rest(connection)


def test_an_answer_has_arrived_once_the_system_has_all_of_it(app: App, address: str) -> None:
    with connected(address) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nconnection: close\r\n\r\n")
        connection.recv(1)
        assert not app.told.wait(0.2), "most of it waits for who reads"
        assert len(rest(connection)) > LARGE
        assert app.told.wait(PATIENCE_S)
    assert app.arrived == [True]


def test_an_answer_that_nobody_reads_to_its_end_has_not_arrived(app: App, address: str) -> None:
    with connected(address) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert app.told.wait(PATIENCE_S)
    assert app.arrived == [False]


def test_a_stream_learns_that_its_server_is_to_stop() -> None:
    begun = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"so far", "more_body": True})
        begun.set()
        await stopping(scope)
        await send({"type": "http.response.body", "body": b", to the end"})

    with ExitStack() as server, ExitStack() as client:
        connection = client.enter_context(connected(server.enter_context(serving(app, lifespan=False))))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert begun.wait(PATIENCE_S)
        server.close()
        assert b", to the end" in rest(connection)


def test_a_server_that_cannot_tell_is_believed() -> None:
    assert asyncio.run(connection.flushed({"type": "http"})) is True


# -- this machine alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:8100"}, 200),
        ({"host": "agent.localhost"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "http://good.example"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors", "origin": "http://good.example"}, 200),
    ],
)
def test_pages_and_names_from_elsewhere_are_refused(app: App, headers: dict[str, str], status: int) -> None:
    with serving(LocalOnly(app, ["http://good.example"]), lifespan=False) as address:
        answer: Any = httpx.get(address, headers=headers, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == status
    if status == 403:
        assert "set a key, or name --host" in answer.json()["detail"]


def test_no_link_of_another_site_leads_to_a_get_that_changes_something(app: App) -> None:
    followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    with (
        serving(LocalOnly(app), lifespan=False) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_S, trust_env=False) as client,
    ):
        for path in ("/batch", "/reset_data"):
            assert client.get(path, headers=followed).status_code == 403
            assert client.get(path).status_code == 200
