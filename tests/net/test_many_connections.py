"""More connections than a server holds: those that ask for nothing make room, those that are at work stay."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send
from tests.gateway.kit import until

from headrace.net.connection import ConnectionBound, bounded_connection, flushed
from headrace.net.server import Server

PATIENCE_S = 120
MOST = 4
LARGE = 30_000_000
ASK = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers `/` at once, `/held` when told to, and `/large` with more than any buffer takes."""

    def __init__(self) -> None:
        self.held = 0
        self.arrived: list[bool] = []
        self._go_on = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        if scope["path"] == "/held":
            self.held += 1
            await self._go_on.wait()
        body = b"x" * LARGE if scope["path"] == "/large" else b"fine"
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.arrived.append(await flushed(scope))

    def go_on(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._go_on.set)


class Clients(ExitStack):
    """Connections to one server, closed at the end."""

    def __init__(self, app: App, bound: ConnectionBound, address: str) -> None:
        super().__init__()
        self.app = app
        self.bound = bound
        self._address = urlsplit(address)

    def connect(self) -> socket.socket:
        assert self._address.hostname is not None
        where = (self._address.hostname, self._address.port)
        return self.enter_context(socket.create_connection(where, timeout=PATIENCE_S))


@contextmanager
def serving(write_s: float = 600) -> Iterator[Clients]:
    app, kind = App(), bounded_connection(MOST, write_s)
    assert kind.bound is not None
    server = Server(app, "127.0.0.1", 0, connection=kind)
    bound = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"ready": lambda _: bound.set()}, daemon=True)
    thread.start()
    assert bound.wait(PATIENCE_S)
    with Clients(app, kind.bound, server.address) as clients:
        yield clients
    server.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def answered(connection: socket.socket, path: bytes = b"") -> bytes:
    connection.sendall(ASK % path)
    return connection.recv(1 << 16)


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_one_that_asked_for_nothing_longest_makes_room_for_a_new_one() -> None:
    with serving() as clients:
        first, second, *_ = idle = [clients.connect() for _ in range(MOST)]
        until(lambda: len(clients.bound.waiting) == MOST)
        assert b"fine" in answered(first)  # and now the second is the one that waits longest
        until(lambda: len(clients.bound.waiting) == MOST)
        assert b"fine" in answered(clients.connect())
        assert closed(second)
        for connection in (first, *idle[2:]):
            assert b"fine" in answered(connection)


def test_many_more_than_it_holds_come_and_the_last_ones_are_served() -> None:
    with serving() as clients:
        connections = [clients.connect() for _ in range(20 * MOST)]
        assert b"fine" in answered(connections[-1])
        assert all(map(closed, connections[: -2 * MOST]))


def test_what_is_at_work_stays_and_the_new_one_is_told_to_come_back() -> None:
    with serving() as clients:
        working = [clients.connect() for _ in range(MOST)]
        for connection in working:
            connection.sendall(ASK % b"held")
        until(lambda: clients.app.held == MOST)
        refused = clients.connect().recv(1 << 16)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refused
        clients.app.go_on()
        assert all(b"fine" in connection.recv(1 << 16) for connection in working)


def test_an_answer_that_nobody_reads_makes_room_where_nothing_else_does() -> None:
    with serving() as clients:
        unread, *working = [clients.connect() for _ in range(MOST)]
        unread.sendall(ASK % b"large")
        for connection in working:
            connection.sendall(ASK % b"held")
        until(lambda: clients.app.held == MOST - 1 and len(clients.bound.unread) == 1)
        assert b"fine" in answered(clients.connect())
        until(lambda: clients.app.arrived[:1] == [False] or False in clients.app.arrived)
        clients.app.go_on()


@pytest.mark.parametrize("says_close", [False, True], ids=["kept", "to be closed"])
def test_who_does_not_read_an_answer_in_time_is_hung_up_on(says_close: bool) -> None:
    with serving(write_s=0.05) as clients:
        connection = clients.connect()
        head = b"GET /large HTTP/1.1\r\nhost: x\r\n" + (b"connection: close\r\n" if says_close else b"") + b"\r\n"
        connection.sendall(head)
        until(lambda: clients.app.arrived == [False])
