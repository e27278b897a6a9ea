"""Both HTTP clients, asked the same: what they send, what they give back, what they say where there is no answer."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest

import headrace.net
from headrace.data.errors import InvalidInput
from headrace.data.keys import UnusableKey
from headrace.net.async_client import AsyncHttpClient
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import BadAddress, HttpAnswer, NoAnswer

PATIENCE_S = 120.0
#: So short that a test need not wait for it, which only what never answers is given.
SOON_S = 0.2


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked; its paths are the ways in which a server can answer otherwise."""

    protocol_version = "HTTP/1.1"
    connections: set[Any] = set()  # noqa: RUF012 - of all requests

    def _answer(self) -> None:
        type(self).connections.add(self.client_address)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        told = {name.lower(): value for name, value in self.headers.items()}
        said = {"method": self.command, "path": self.path, "headers": told, "body": body.decode()}
        match self.path.partition("?")[0]:
            case "/endless":
                self._say(200, None)
                with self._gone():
                    while True:
                        self.wfile.write(b"x" * 65536)
            case "/cut":
                self._say(200, 1000)
                self.wfile.write(b"half")
                self.close_connection = True
            case "/hang":
                self.server.ending.wait(PATIENCE_S)  # type: ignore[attr-defined]
                self.close_connection = True
            case "/away":
                self._say(307, 0, location="/elsewhere", **{"set-cookie": "a=b"})
            case "/packed":
                packed = gzip.compress(b"unpacked")
                self._say(200, len(packed), **{"content-encoding": "gzip"})
                self.wfile.write(packed)
            case "/refused":
                self._whole(422, {"error": {"message": "there is no such model"}})
            case _:
                self._whole(200, said)

    do_GET = do_POST = do_DELETE = _answer

    def _whole(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self._say(status, len(data), **{"content-type": "application/json; charset=utf-8"})
        self.wfile.write(data)

    def _say(self, status: int, length: int | None, **headers: str) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("content-length", str(length))
        else:
            self.close_connection = True
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    @contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass


class EchoServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: Any = ("127.0.0.1", 0)) -> None:
        self.ending = threading.Event()
        self.accepted = 0
        super().__init__(address, type("OwnEcho", (Echo,), {"connections": set()}))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.accepted += 1  # in the thread that accepts: in the order in which clients connected
        super().process_request(request, client_address)

    @property
    def connections(self) -> set[Any]:
        found: set[Any] = self.RequestHandlerClass.connections  # type: ignore[attr-defined]
        return found


class UnixEchoServer(EchoServer):
    address_family = socket.AF_UNIX

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "unix", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("unix", 0)


@contextmanager
def running(server: EchoServer) -> Iterator[EchoServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ending.set()
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE_S)


@pytest.fixture
def server() -> Iterator[EchoServer]:
    with running(EchoServer()) as found:
        yield found


class Ask(Protocol):
    """One client of an address, made with `options`, makes the same request `times` times; the answers."""

    def __call__(
        self, address: str, *request: Any, options: dict[str, Any] | None = None, times: int = 1, **more: Any
    ) -> list[HttpAnswer]: ...


def ask_blocking(
    address: str, *request: Any, options: dict[str, Any] | None = None, times: int = 1, **more: Any
) -> list[HttpAnswer]:
    client = BlockingHttpClient(address, **{"timeout_s": PATIENCE_S, **(options or {})})
    try:
        return [client.request(*request, **more) for _ in range(times)]
    finally:
        client.close()


def ask_async(
    address: str, *request: Any, options: dict[str, Any] | None = None, times: int = 1, **more: Any
) -> list[HttpAnswer]:
    given = dict(options or {})
    if given.pop("keep_alive", False):  # it always does, for a time
        given["keep_alive_s"] = PATIENCE_S
    if "timeout_s" in given:
        given["total_s"] = given.pop("timeout_s")

    async def asked() -> list[HttpAnswer]:
        client = AsyncHttpClient(address, **{"total_s": PATIENCE_S, **given})
        try:
            return [await client.request(*request, **more) for _ in range(times)]
        finally:
            await client.close()

    return asyncio.run(asked())


both = pytest.mark.parametrize("ask", [ask_blocking, ask_async], ids=["blocking", "async"])


@both
def test_json_and_a_key_go_out_and_json_comes_back(server: EchoServer, ask: Ask) -> None:
    (answer,) = ask(f"{server.address}/base/", "POST", "/path?q=1", json={"a": [1]}, options={"key": "secret"})
    assert (answer.status, answer.content_type) == (200, "application/json")
    said = answer.json()
    assert (said["method"], said["path"], said["body"]) == ("POST", "/base/path?q=1", '{"a":[1]}')
    assert said["headers"]["authorization"] == "Bearer secret"
    assert said["headers"]["content-type"] == "application/json"
    assert answer.headers.get("Content-TYPE", "").startswith("application/json")


@both
def test_a_key_goes_out_without_the_end_of_its_line(server: EchoServer, ask: Ask) -> None:
    (answer,) = ask(server.address, "GET", "/", options={"key": "secret\n"})
    assert answer.json()["headers"]["authorization"] == "Bearer secret"


@both
@pytest.mark.parametrize("key", ["сек-рет", "sec\nret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(ask: Ask, key: str) -> None:
    with pytest.raises(UnusableKey, match=r"^the key for http://127.0.0.1:9: a key is printable ASCII") as found:
        ask("http://127.0.0.1:9", "GET", "/", options={"key": key})
    assert "ret" not in str(found.value)


@both
def test_bytes_go_out_as_they_are_under_the_caller_s_headers(server: EchoServer, ask: Ask) -> None:
    (answer,) = ask(server.address, "POST", "/", b"\x01frame", headers={"content-type": "application/x-frame"})
    assert answer.json()["body"] == "\x01frame"
    assert answer.json()["headers"]["content-type"] == "application/x-frame"


@both
def test_an_answer_of_any_status_is_an_answer(server: EchoServer, ask: Ask) -> None:
    (answer,) = ask(server.address, "GET", "/refused")
    assert (answer.status, answer.error_text()) == (422, "there is no such model")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "why"}}', "why"),
        ('{"error": "why"}', "why"),
        ('{"detail": "why", "code": "c"}', "why"),
        ('{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        ('{"other": 1}', '{"other":1}'),
        ("<html>", "<html>"),
        ("", ""),
    ],
)
def test_an_error_s_words_are_found_in_whichever_shape_they_come(body: str, said: str) -> None:
    assert HttpAnswer(500, {}, body.encode()).error_text() == said


@both
def test_a_server_that_is_not_there_is_named_with_the_route_and_without_the_query(ask: Ask) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(NoAnswer, match=f"{address} cannot be reached for /path: ") as found:
            ask(address, "GET", "/path?key=secret")
    assert "secret" not in str(found.value)
    assert not found.value.timed_out
    assert found.value.reason in str(found.value)


@both
def test_an_answer_that_does_not_come_in_time_is_told_apart(server: EchoServer, ask: Ask) -> None:
    with pytest.raises(NoAnswer, match=r"did not answer /hang within 0\.2 s") as found:
        ask(server.address, "GET", "/hang", options={"timeout_s": SOON_S})
    assert found.value.timed_out


@both
def test_half_an_answer_is_none(server: EchoServer, ask: Ask) -> None:
    with pytest.raises(NoAnswer, match="cannot be reached for /cut"):
        ask(server.address, "GET", "/cut")


@both
@pytest.mark.parametrize("path", ["/endless", "/told"])
def test_no_more_is_read_than_is_allowed(server: EchoServer, ask: Ask, path: str) -> None:
    with pytest.raises(NoAnswer, match=f"answered {path} with more than 100 bytes"):
        ask(server.address, "POST", path, b"x" * 200, options={"max_bytes": 100})


@both
def test_a_connection_is_kept_for_the_next_request(server: EchoServer, ask: Ask) -> None:
    ask(server.address, "GET", "/", options={"keep_alive": True}, times=3)
    assert len(server.connections) == 1


def test_without_keep_alive_every_request_has_its_own_connection(server: EchoServer) -> None:
    ask_blocking(server.address, "GET", "/", times=3)
    assert len(server.connections) == 3


def test_a_kept_connection_that_the_server_closed_costs_no_answer(server: EchoServer) -> None:
    client = BlockingHttpClient(server.address, timeout_s=PATIENCE_S, keep_alive=True)
    client.request("GET", "/")
    client._kept.connection.sock.shutdown(socket.SHUT_RDWR)
    assert client.request("POST", "/", b"again").json()["body"] == "again"
    client.close()
    assert server.accepted == 2


def test_a_time_out_on_a_kept_connection_is_not_waited_for_twice(server: EchoServer) -> None:
    client = BlockingHttpClient(server.address, timeout_s=PATIENCE_S, keep_alive=True)
    client.request("GET", "/")
    with pytest.raises(NoAnswer, match=r"did not answer /hang within 0\.2 s") as found:
        client.request("GET", "/hang", timeout_s=SOON_S)
    assert found.value.timed_out
    client.request("GET", "/")  # on a connection that is accepted after every earlier one
    client.close()
    assert server.accepted == 2, "the request that was late was made again"


@both
def test_a_unix_socket_is_a_server_like_any_other(ask: Ask) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        path = str(Path(folder) / "server.sock")
        with running(UnixEchoServer(path)):
            (answer,) = ask("http://unix", "GET", "/there", options={"socket_path": path})
        assert answer.json()["path"] == "/there"
        with pytest.raises(NoAnswer, match="http://unix cannot be reached for /there"):
            ask("http://unix", "GET", "/there", options={"socket_path": f"{path}.other"})


@both
@pytest.mark.parametrize("address", ["localhost:8000", "http://", "http://host:port", "http://[", "ftp://host"])
def test_an_address_that_is_none_is_told_with_one_that_would_be(ask: Ask, address: str) -> None:
    with pytest.raises(BadAddress, match=r"is no server's address; it looks like http://HOST:PORT") as found:
        ask(address, "GET", "/")
    assert isinstance(found.value, InvalidInput)


async def test_without_an_address_whole_urls_are_asked_and_named(server: EchoServer) -> None:
    client = AsyncHttpClient(total_s=PATIENCE_S)
    assert (await client.request("GET", f"{server.address}/a")).json()["path"] == "/a"
    url = "http://127.0.0.1:1/a"
    with pytest.raises(NoAnswer, match=f"^{url} cannot be reached: "):
        await client.request("GET", f"{url}?key=secret")
    await client.close()


def test_a_client_that_several_loops_used_ends_without_a_word(
    server: EchoServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = AsyncHttpClient(server.address, total_s=PATIENCE_S, keep_alive_s=PATIENCE_S)
    for _ in range(3):
        assert asyncio.run(client.request("GET", "/a")).json()["path"] == "/a"
    del client
    gc.collect()
    assert caplog.records == []


async def test_a_stream_comes_as_it_was_sent_with_nothing_added(server: EchoServer) -> None:
    client = AsyncHttpClient(server.address, total_s=PATIENCE_S, verbatim=True)
    async with client.stream("POST", "/packed", b"{}", headers={"x-own": "1"}) as answer:
        assert ("content-encoding", "gzip") in answer.headers
        assert gzip.decompress(b"".join([part async for part in answer.parts()])) == b"unpacked"
    async with client.stream("POST", "/away", b"{}") as answer:
        assert answer.status == 307
    said = (await client.request("POST", "/", b"{}", headers={"x-own": "1"})).json()
    assert set(said["headers"]) == {"host", "x-own", "content-length"}
    with pytest.raises(NoAnswer, match="cannot be reached"):
        async with client.stream("GET", "/cut") as answer:
            assert [part async for part in answer.parts()]
    await client.close()


def test_redirects_are_followed_unless_the_caller_says_otherwise(server: EchoServer) -> None:
    (answer,) = ask_async(server.address, "POST", "/away", b"{}")
    assert answer.json()["path"] == "/elsewhere"
    (answer,) = ask_async(server.address, "POST", "/away", b"{}", options={"follow_redirects": False})
    assert answer.status == 307
    (answer,) = ask_blocking(server.address, "POST", "/away", b"{}")
    assert answer.status == 307


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a server's certificate and key, which no authority has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("authority")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run([*made, *names], cwd=folder, check=True, capture_output=True)
    return folder


#: Asks for a path with each of the three clients; prints each one's status or error.
ASK_WITH_ALL = """
import asyncio, sys
from yarl import URL
from headrace.gateway.upstream.http_client import HttpConnections, HttpError
from headrace.net.async_client import AsyncHttpClient
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import NoAnswer

async def upstream(address):
    return (await HttpConnections({}, connect_s=60, keep_alive_s=1).request("GET", URL(address + "/"), None)).status

async def shared(address):
    client = AsyncHttpClient(address, total_s=60)
    try:
        return (await client.request("GET", "/")).status
    finally:
        await client.close()

def blocking(address):
    return BlockingHttpClient(address, timeout_s=60).request("GET", "/").status

for ask in (lambda a: asyncio.run(upstream(a)), lambda a: asyncio.run(shared(a)), blocking):
    try:
        print(ask(sys.argv[1]))
    except (HttpError, NoAnswer) as error:
        print("CERTIFICATE_VERIFY_FAILED" if "CERTIFICATE_VERIFY_FAILED" in str(error) else error)
"""
PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy")


def test_certificates_are_those_of_the_environment_and_no_proxy_is_used(server: EchoServer, authority: Path) -> None:
    """As docs/gateway.md says, of the gateway's client and of both here."""
    secure = EchoServer()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "certificate.pem", authority / "key.pem")
    secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
    secure.handle_error = lambda *_: None  # type: ignore[method-assign] # clients that do not trust it hang up
    variables = {name: value for name, value in os.environ.items() if name not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    variables |= dict.fromkeys(PROXY_VARIABLES, server.address)
    command = [sys.executable, "-c", ASK_WITH_ALL, f"https://127.0.0.1:{secure.server_port}"]

    def ask(**more: str) -> list[str]:
        done = subprocess.run(command, env={**variables, **more}, capture_output=True, text=True, check=True)
        return done.stdout.split()

    with running(secure):
        assert ask() == ["CERTIFICATE_VERIFY_FAILED"] * 3
        assert ask(SSL_CERT_FILE=str(authority / "certificate.pem")) == ["200"] * 3
    assert not server.connections, "a proxy was asked"


#: What a client could be made of. Servers' own libraries are none.
LIBRARIES = re.compile(
    r"^\s*(?:import|from) (?:aiohttp|httpx|requests|urllib3|http\.client|urllib\.request)\b", re.MULTILINE
)
#: Where one may be: here, what the package's docstring names, and errors of subclasses' own clients.
ALLOWED = ("net/", "bench/", "compat/", "envs/server/api_server.py")


def test_nobody_else_brings_a_client() -> None:
    source = Path(headrace.net.__file__).parent.parent
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if LIBRARIES.search(path.read_text())}
    assert {path for path in found if not path.startswith(ALLOWED)} == set()
