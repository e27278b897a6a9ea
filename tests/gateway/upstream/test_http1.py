"""The client's flow control: however much comes before it is asked for, a whole answer is read to its end."""

from __future__ import annotations

import asyncio

import pytest
from yarl import URL

from headrace.gateway.upstream.http1 import HIGH_WATER, Http1, Unconnected


async def test_a_large_answer_is_read_whole_though_most_of_it_came_before_it_was_asked_for() -> None:
    body = b"x" * (4 * HIGH_WATER)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = Http1({}, connect_s=60, keep_alive_s=4)
    try:
        port = server.sockets[0].getsockname()[1]
        response = await client.request("GET", URL(f"http://127.0.0.1:{port}/"), None)
        while response._size < HIGH_WATER:  # so that the server was made to wait before all is asked for
            await asyncio.sleep(0)
        assert await response.read() == body
    finally:
        client.close()
        server.close()


async def test_a_name_that_no_host_can_have_is_a_server_out_of_reach() -> None:
    client = Http1({}, connect_s=60, keep_alive_s=4)
    with pytest.raises(Unconnected, match="no connection to"):
        await client.request("GET", URL.build(scheme="http", host="a" * 80 + ".example", port=80, path="/"), None)
