"""What a rollout server writes on its connection: whole answers, streams, and ways to misbehave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

Writer = asyncio.StreamWriter


async def respond(writer: Writer, status: int, answer: Any, *headers: str) -> None:
    """A whole HTTP answer: JSON, bytes, or a list of bytes as a chunked stream."""
    if isinstance(answer, list):
        await begin_stream(writer)
        for part in answer:
            await send(writer, part)
        await end_stream(writer)
        return
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(body)}", "content-type: application/json", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    await writer.drain()


async def begin_stream(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()


async def send(writer: Writer, part: bytes) -> None:
    """One chunk of a stream."""
    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    await writer.drain()


async def end_stream(writer: Writer) -> None:
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


# -- ways to misbehave, whatever is asked ------------------------------------------------------------------------------


async def hangs(asked: Any, writer: Writer) -> None:
    await asyncio.Event().wait()


async def breaks(asked: Any, writer: Writer) -> None:
    writer.transport.abort()


async def drips(asked: Any, writer: Writer) -> None:
    """A byte now and then, for ever."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)
