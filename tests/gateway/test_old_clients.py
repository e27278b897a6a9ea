"""Clients that speak HTTP as few do: its first version, or closing their side once they have asked."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from tests.gateway.kit import Running, told, until
from tests.gateway.rollout import Rollout, Say, content_of, uid_of, user


@pytest.fixture
def gateway(common: Running, rollout: Rollout) -> Running:
    return common


@contextmanager
def asking(base: str, version: str, *, stream: bool) -> Iterator[socket.socket]:
    """A connection on which a call was made."""
    parts, data = urlsplit(base), json.dumps({"messages": [user("hi")], "stream": stream}).encode()
    head = f"POST {parts.path}/v1/chat/completions HTTP/{version}\r\nhost: {parts.netloc}\r\n"
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=240) as connection:
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def answer(connection: socket.socket) -> tuple[dict[str, str], str]:
    """The headers and the text of the answer on a connection, up to its end."""
    found = http.client.HTTPResponse(connection)
    found.begin()
    assert found.status == 200
    return {name.lower(): value for name, value in found.getheaders()}, found.read().decode()


@pytest.mark.parametrize("half_closed", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_http_1_0_is_not_chunked_and_ends_with_its_connection(
    gateway: Running, rollout: Rollout, base: str, stream: bool, half_closed: bool
) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("one two three", at=gate))
    with asking(base, "1.0", stream=stream) as connection:
        gate.reached()
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
            told(gateway.get("/health"))  # whoever answers this has seen the other before
        gate.open()
        headers, text = answer(connection)
        assert connection.recv(1) == b""
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"
    said = content_of(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
    assert said == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closed_its_side_is_answered(gateway: Running, rollout: Rollout, base: str, stream: bool) -> None:
    """However long it takes: it is asked again and again whether it is there, and does not mind."""
    gate = rollout.gate()
    rollout.script.append(Say("one two three", at=gate))
    with asking(base, "1.1", stream=stream) as connection:
        connection.shutdown(socket.SHUT_WR)
        gate.reached()
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        until(lambda: connection.recv(1000, socket.MSG_PEEK).startswith(2 * interim))
        gate.open()
        headers, text = answer(connection)
    assert headers["connection"] == "close"
    said = content_of(text) if stream else json.loads(text)["choices"][0]["message"]["content"]
    assert said == "one two three"
    assert len(gateway.steps(uid_of(base))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_closed_both_is_not_waited_for(gateway: Running, rollout: Rollout, base: str, stream: bool) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("never", at=gate))
    with asking(base, "1.1", stream=stream):
        gate.reached()
    rollout.until(lambda: rollout.hung_up == 1)
    until(lambda: gateway.counted("in_flight") == 0)
    assert gateway.steps(uid_of(base)) == []
    gate.open()
