"""The HTTP client: flow control, and events out of bytes, however they were cut."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from headrace.gateway.upstream.http_client import HIGH_WATER_BYTES, ConnectFailed, HttpConnections, SseDecoder


async def test_a_large_answer_is_read_whole_though_most_of_it_came_before_it_was_asked_for() -> None:
    body = b"x" * (4 * HIGH_WATER_BYTES)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = HttpConnections({}, connect_s=60, keep_alive_s=4)
    try:
        port = server.sockets[0].getsockname()[1]
        response = await client.request("GET", URL(f"http://127.0.0.1:{port}/"), None)
        while response._size < HIGH_WATER_BYTES:  # so that the server was made to wait before all is asked for
            await asyncio.sleep(0)
        assert await response.read() == body
    finally:
        client.close()
        server.close()


async def test_a_name_that_no_host_can_have_is_a_server_out_of_reach() -> None:
    client = HttpConnections({}, connect_s=60, keep_alive_s=4)
    with pytest.raises(ConnectFailed, match="no connection to"):
        await client.request("GET", URL.build(scheme="http", host="a" * 80 + ".example", port=80, path="/"), None)


payloads = st.lists(st.binary(min_size=1).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def events(parts: list[bytes]) -> list[bytes]:
    splitter = SseDecoder()
    return [event for part in parts for event in splitter.feed(part)]


@given(payloads, st.lists(st.integers(0, 10_000)), st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b" ", b""]))
def test_any_chunking_gives_the_same_events(sent: list[bytes], at: list[int], end: bytes, space: bytes) -> None:
    if not space:  # one leading space belongs to the field, not to the data
        sent = [data.lstrip(b" ") or b"x" for data in sent]
    stream = b"".join(b"data:" + space + data + end + end for data in sent)
    assert events(cut(stream, at)) == sent


def test_comments_and_other_fields_are_passed_over() -> None:
    stream = b": keep-alive\n\nevent: message\nid: 7\ndata: one\n\nretry: 10\n\ndata: two\n\n"
    assert events([stream]) == [b"one", b"two"]


def test_data_in_several_lines_is_one_event() -> None:
    assert events([b'data: {"a":\ndata: 1}\n\n']) == [b'{"a":\n1}']


def test_an_event_without_its_end_is_not_given() -> None:
    assert events([b"data: whole\n\ndata: half\n"]) == [b"whole"]


def test_bytes_one_by_one_cost_no_more_than_once_each() -> None:
    splitter = SseDecoder()
    for _ in range(100_000):
        assert splitter.feed(b"x") == []
    assert splitter.feed(b"\n") == []
