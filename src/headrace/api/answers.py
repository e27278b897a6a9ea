"""Answers, and whether they arrived: what hangs on that is settled by it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from isal import isal_zlib
from starlette.requests import Request
from starlette.types import Send

from headrace.net.connection import flushed

log = logging.getLogger("headrace.api")

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
#: Answers of so many bytes are compressed for those who take that.
GZIP_FROM = 1000
#: Bytes that are handed to the connection at once: the rest waits until it has taken them.
PART = 256 * 1024
#: Rounds of the event loop in which a hang-up that lies in the socket is noticed.
ROUNDS = 4

_GZIP = 31

#: Told whether the answer was written to a connection that was still open.
Settle = Callable[[bool], Awaitable[None]]


@dataclass(frozen=True)
class Answer:
    """What is sent. `settle` is told once the system has all of it, or that nobody was there: a process that dies in
    between has told nobody, and what hangs on the answer is as if it had not been given."""

    body: bytes
    status: int = 200
    kind: bytes = JSON
    packed: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()
    settle: Settle | None = None


def answer(value: Any, status: int = 200, settle: Settle | None = None) -> Answer:
    return Answer(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(), status, settle=settle)


def takes_gzip(request: Request) -> bool:
    for offer in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = offer.replace(" ", "").partition(";q=")
        if name == "gzip":
            return quality.strip("0.") != "" or not quality
    return False


def packed(found: Answer, request: Request) -> Answer:
    """The answer as gzip, where that is worth it and wanted."""
    if found.packed or len(found.body) < GZIP_FROM or not takes_gzip(request):
        return found
    return replace(found, body=isal_zlib.compress(found.body, wbits=_GZIP), packed=True)


async def deliver(found: Answer, request: Request, send: Send, within_s: float) -> None:
    """Writes the answer, and settles what hangs on it, however that ends."""
    if found.settle is None:
        await _begin(found, send)
        await _write(send, found.body, more=False)
        return
    arrived = False
    try:
        async with asyncio.timeout(within_s):
            arrived = await _written(found, request, send)
    except TimeoutError:
        log.warning("an answer of %d bytes was not read within %g s", len(found.body), within_s)
    finally:
        await asyncio.shield(asyncio.ensure_future(found.settle(arrived)))


async def _written(found: Answer, request: Request, send: Send) -> bool:
    """Writes the answer; whether the system took all of it while somebody was there."""
    if await _hung_up(request):
        return False
    await _begin(found, send)
    last = max(0, len(found.body) - PART)
    for at in range(0, last, PART):
        await _write(send, found.body[at : min(at + PART, last)])
    if last and await _hung_up(request):
        return False
    await _write(send, found.body[last:], more=False)
    return await flushed(request.scope)


async def _hung_up(request: Request) -> bool:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    return await request.is_disconnected()


async def _write(send: Send, part: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})


async def _begin(found: Answer, send: Send) -> None:
    headers = [(b"content-type", found.kind), (b"content-length", b"%d" % len(found.body)), *found.headers]
    if found.packed:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding")]
    await send({"type": "http.response.start", "status": found.status, "headers": headers})
