"""One HTTP client for all servers: as many connections as calls, kept open between them, no redirects."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import orjson
from yarl import URL

from headrace.gateway.upstream.errors import Failed
from headrace.gateway.upstream.http1 import Dropped, Http1, HttpError, Response, Unconnected
from headrace.gateway.upstream.options import Options

#: vLLM and uvicorn close a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0
#: The most that is read of an answer that only says what went wrong.
SMALL = 1 << 20


class TooLarge(Exception):
    """An answer that is not read to its end."""


class Client:
    """Made in the loop that it is used in."""

    def __init__(self, options: Options) -> None:
        headers = {"Content-Type": "application/json", "Accept": "*/*", "User-Agent": "headrace"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._http = Http1(headers, connect_s=options.connect_s, keep_alive_s=KEEP_ALIVE_S)

    async def post(self, url: URL, body: bytes | None) -> Response:
        return await self._http.request("POST", url, body)

    async def ask(self, method: str, url: URL, body: Any, within_s: float) -> tuple[int, bytes]:
        """A small question: the status and the body of the answer. `Failed` where there is none in time."""
        response: Response | None = None
        try:
            async with asyncio.timeout(within_s):
                data = None if body is None else orjson.dumps(body)
                response = await self._http.request(method, url, data)
                return response.status, await read_up_to(response, SMALL)
        except (Unconnected, Dropped) as error:
            raise Failed(unreachable(error), "unreachable") from error
        except TimeoutError:
            raise Failed(f"{url.path} did not answer within {within_s:g} s", "hang") from None
        except TooLarge as error:
            raise Failed(f"{url.path} gives {error}", "too_large") from error
        except HttpError as error:
            raise Failed(f"{url.path} does not speak HTTP as it should: {error}", "malformed") from error
        finally:
            if response is not None:
                response.close()

    async def close(self) -> None:
        self._http.close()


async def read_up_to(response: Response, limit: int) -> bytes:
    """The whole body, in no more memory than the limit."""
    told = response.content_length
    if told is not None and told <= limit:
        return await response.read()
    if told is not None:
        raise TooLarge(f"an answer of {told} bytes, more than the {limit} allowed")
    parts, size = [], 0
    while part := await response.readany():
        size += len(part)
        if size > limit:
            raise TooLarge(f"an answer of more than the {limit} bytes allowed")
        parts.append(part)
    return b"".join(parts)


def unreachable(error: BaseException) -> str:
    # A name with several addresses fails with one error that quotes those of each.
    if f"[Errno {errno.ECONNREFUSED}]" in str(error.__cause__):
        return "connection refused"
    return f"the connection failed: {words(error)}"


def words(error: BaseException) -> str:
    return str(error) or type(error).__name__
