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
    """`early`: it counts as arrived when only its last byte is left to write, so that who has all of it can rely on
    what hangs on it, even if this process dies the moment after."""

    body: bytes
    status: int = 200
    kind: bytes = JSON
    packed: bool = False
    settle: Settle | None = None
    early: bool = False


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
    settling: asyncio.Future[None] | None = None
    arrived = False
    try:
        async with asyncio.timeout(within_s):
            last = await _all_but_the_last(found, request, send)
            if last is not None:
                if found.early:
                    settling = asyncio.ensure_future(found.settle(True))
                    await asyncio.sleep(0)  # it is begun now, and written down where the pool is in this process
                await _write(send, last, more=False)
                arrived = True
    except TimeoutError:
        log.warning("an answer of %d bytes was not read within %g s", len(found.body), within_s)
    finally:
        await asyncio.shield(settling or asyncio.ensure_future(found.settle(arrived)))


async def _all_but_the_last(found: Answer, request: Request, send: Send) -> bytes | None:
    """Writes what comes before the last part, which it gives; None where nobody is there any more."""
    if await _hung_up(request):
        return None
    await _begin(found, send)
    if len(found.body) <= PART:
        return found.body
    whole = len(found.body) - 1
    for at in range(0, whole, PART):
        await _write(send, found.body[at : min(at + PART, whole)])
    await _write(send, b"")  # waits until the connection has taken the rest
    return None if await _hung_up(request) else found.body[whole:]


async def _hung_up(request: Request) -> bool:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    return await request.is_disconnected()


async def _write(send: Send, part: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})


async def _begin(found: Answer, send: Send) -> None:
    headers = [(b"content-type", found.kind), (b"content-length", b"%d" % len(found.body))]
    if found.packed:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding")]
    await send({"type": "http.response.start", "status": found.status, "headers": headers})
