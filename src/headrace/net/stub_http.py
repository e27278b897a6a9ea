"""HTTP/1.1 as a rollout server that is only played speaks it: requests off a connection, answers and events as bytes.

For servers of benchmarks and storms, which decide themselves when each byte of an answer is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

#: The head of an answer that is a stream of events, each of them a chunk.
EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
REASONS = {200: b"OK", 404: b"Not Found"}


async def requests_of(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """The path and the body of each request on a connection, until it ends."""
    while line := await reader.readline():
        length = 0
        while (header := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        yield line.split(b" ")[1].decode(), await reader.readexactly(length)


def whole_answer(status: int, body: dict[str, Any]) -> bytes:
    """An answer in one piece."""
    data = orjson.dumps(body)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n" % (status, REASONS[status])
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


def event_chunk(event: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return _chunk(b"data: " + orjson.dumps(event) + b"\n\n")


def last_chunks(event: dict[str, Any]) -> bytes:
    """The last event of a stream, and its end."""
    return event_chunk(event) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
