"""The API's responses, and whether they arrived.

A batch counts as taken, and the key of a posted group may be forgotten, only once the response has arrived: `deliver`
writes a response and then calls its `settle` with whether it did.
"""

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
#: Bytes from which a response is compressed, for clients that take gzip; below, the header would eat the gain.
GZIP_FROM_BYTES = 1000
#: Bytes that are handed to the connection at once: the rest waits until it has taken them.
PART_BYTES = 256 * 1024
#: Turns of the event loop within which a hang-up that lies in the socket is noticed.
HANG_UP_TURNS = 4

_GZIP = 31  # `wbits` of a gzip member
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: Called with whether the response was written to a connection that was still open; what it has to wait for, if any, is
#: then awaited to its end.
Settle = Callable[[bool], Awaitable[None] | None]


@dataclass(frozen=True)
class ApiResponse:
    """What is sent. `gzipped`: the body is compressed already.

    `settle` is called once the system has all of it, or the client hung up. A process that dies in between has
    called nothing: what hangs on the response is then as if it had not been given.
    """

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    gzipped: bool = False
    headers: tuple[tuple[bytes, bytes], ...] = ()
    settle: Settle | None = None


def json_response(value: Any, status: int = 200, settle: Settle | None = None) -> ApiResponse:
    """A response whose body is `value` as JSON."""
    return ApiResponse(_ENCODER.encode(value).encode(), status, settle=settle)


def takes_gzip(request: Request) -> bool:
    """Whether the client said, in `accept-encoding`, that it reads gzip."""
    for offer in request.headers.get("accept-encoding", "").lower().split(","):
        name, _, quality = offer.replace(" ", "").partition(";q=")
        if name == "gzip":
            return quality.strip("0.") != "" or not quality
    return False


def gzipped(response: ApiResponse, request: Request) -> ApiResponse:
    """The response as gzip, where that is worth it and the client takes it."""
    if response.gzipped or len(response.body) < GZIP_FROM_BYTES or not takes_gzip(request):
        return response
    return replace(response, body=isal_zlib.compress(response.body, wbits=_GZIP), gzipped=True)


async def deliver(response: ApiResponse, request: Request, send: Send, within_s: float) -> None:
    """Writes the response within so many seconds, and settles what hangs on it, however that ends."""
    if response.settle is None:
        await _begin(response, send)
        await _write(send, response.body, more=False)
        return
    arrived = False
    try:
        async with asyncio.timeout(within_s):
            arrived = await _written(response, request, send)
    except TimeoutError:
        log.warning("an answer of %d bytes was not read within %g s", len(response.body), within_s)
    finally:
        if (settling := response.settle(arrived)) is not None:
            await asyncio.shield(asyncio.ensure_future(settling))


async def _written(response: ApiResponse, request: Request, send: Send) -> bool:
    """Writes the response; whether the system took all of it while the client was there."""
    if await _hung_up(request):
        return False
    await _begin(response, send)
    last = max(0, len(response.body) - PART_BYTES)
    for at in range(0, last, PART_BYTES):
        await _write(send, response.body[at : min(at + PART_BYTES, last)])
    if last and await _hung_up(request):
        return False
    await _write(send, response.body[last:], more=False)
    return await flushed(request.scope)


async def _hung_up(request: Request) -> bool:
    for _ in range(HANG_UP_TURNS):
        await asyncio.sleep(0)
    # Once its body is read, all that is left to receive is that the client left: what would have to be waited for is
    # not there. `Request.is_disconnected` asks the same, at the price of a scope that is made and cancelled.
    receiving = request.receive().__await__()
    try:
        next(receiving)
    except StopIteration as received:
        return bool(received.value["type"] == "http.disconnect")
    else:
        return False
    finally:
        receiving.close()


async def _write(send: Send, part: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": more})


async def _begin(response: ApiResponse, send: Send) -> None:
    headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(response.body)),
        *response.headers,
    ]
    if response.gzipped:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding")]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
