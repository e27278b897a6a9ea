"""Heads of requests as no client of ours writes them: an error, or the connection's end, and the next one is served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.fuzzing import damaged, examples
from tests.gateway.kit import serving

from headrace.gateway.retries import RetryMark
from headrace.net.server import BodyTooLarge, presented_key, read_body

LIMIT = 1000
PATIENCE_S = 120


async def echo(request: Request) -> Response:
    try:
        body = await read_body(request, LIMIT)
    except BodyTooLarge:
        return JSONResponse({"detail": "too large"}, 413)
    mark = RetryMark.of(request)
    return JSONResponse({"size": len(body), "key": len(presented_key(request)), "retry": [mark.key, mark.count]})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(Starlette(routes=[Route("/", echo, methods=["GET", "POST"])]), lifespan=False) as found:
        yield found


def spoken(address: str, data: bytes) -> bytes:
    """What a server says to these bytes, until it hangs up, or has answered."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            found = b""
            while part := connection.recv(65536):
                found += part
        except OSError:  # it hung up in the middle: as good
            return b""
    return found


def still_serves(address: str) -> None:
    assert httpx.post(address, content=b"12345", trust_env=False, timeout=PATIENCE_S).json()["size"] == 5


def request(*lines: bytes, body: bytes = b"12345", method: bytes = b"POST") -> bytes:
    return b"\r\n".join([method + b" / HTTP/1.1", b"host: a", b"connection: close", *lines, b"", b""]) + body


HEADS: dict[str, tuple[bytes, set[int]]] = {
    "a length below nothing": (request(b"content-length: -1"), {400}),
    "a length that is no number": (request(b"content-length: five"), {400}),
    "a length in other digits": (request("content-length: ٥".encode()), {400}),
    "a length of many digits": (request(b"content-length: " + b"9" * 400), {400, 413}),
    "a length past the limit": (request(b"content-length: 1001"), {413}),
    "two lengths": (request(b"content-length: 5", b"content-length: 6"), {400}),
    "a length and chunks": (request(b"content-length: 5", b"transfer-encoding: chunked"), {400}),
    "a coding that is not known": (
        request(b"transfer-encoding: chunked, rot13", body=b"5\r\n12345\r\n0\r\n\r\n"),
        {400},
    ),
    "chunks past the limit": (request(b"transfer-encoding: chunked", body=b"fff\r\n" + b"x" * 0xFFF), {413}),
    "a chunk below nothing": (request(b"transfer-encoding: chunked", body=b"-5\r\n12345\r\n"), {400}),
    "a head without end": (request(b"x: " + b"y" * 4_000_000), {400, 431}),
    "a line that goes on": (request(b"x: a\r\n b", b"content-length: 5"), {200, 400}),
    "a name with a space": (request(b"content-length : 5"), {400}),
    "a null": (request(b"x: a\0b", b"content-length: 5"), {200, 400}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", {400}),
    "a version to come": (b"POST / HTTP/9.9\r\nhost: a\r\ncontent-length: 0\r\n\r\n", {200, 400, 505}),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 404, 405, 505}),
}


@pytest.mark.parametrize(("data", "statuses"), HEADS.values(), ids=HEADS)
def test_a_head_that_cannot_be_meant_is_refused(address: str, data: bytes, statuses: set[int]) -> None:
    answer = spoken(address, data)
    if answer:  # else it hung up
        assert int(answer.split(b" ")[1]) in statuses, answer[:200]
        assert answer.count(b"HTTP/1.1 ") == 1, "one request, one answer"
    still_serves(address)


KEYED = request(
    b"authorization: Bearer key", b"idempotency-key: k", b"x-stainless-retry-count: 2", b"content-length: 5"
)


@examples(40)
@given(data=damaged(KEYED))
def test_a_damaged_head_never_fails_the_application(address: str, data: bytes) -> None:
    answer = spoken(address, data)
    if answer.startswith(b"HTTP/"):
        assert int(answer.split(b" ")[1]) < 500, answer[:200]


TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=12)


@examples(40)
@given(
    key=TEXT,
    count=TEXT | st.sampled_from(["²", "9" * 400, "-1", "1e3", "٣"]),
    parent=TEXT | st.sampled_from(["00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-" + "g" * 5000]),
)
def test_what_a_header_says_is_text_and_no_more(address: str, key: str, count: str, parent: str) -> None:
    headers: list[tuple[str, bytes]] = [
        (name, value.strip().encode("latin-1", "replace"))
        for name, value in (
            ("authorization", f"Bearer {key}"),
            ("x-api-key", key),
            ("idempotency-key", key),
            ("x-stainless-retry-count", count),
            ("traceparent", parent),
            ("accept", parent),
        )
    ]
    found: Any = httpx.post(address, content=b"12345", headers=headers, trust_env=False, timeout=PATIENCE_S)
    assert found.status_code == 200, found.text
    assert found.json()["size"] == 5
