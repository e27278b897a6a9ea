"""One server's HTTP side: JSON in, JSON out, and every failure as one of ours."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import orjson

from headrace.data.errors import shown
from headrace.envs.server.answers import plain
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.errors import RequestRefused, Unavailable

OFFICIAL_URL = "https://api.openai.com/v1"
CONNECT_S = 30.0
#: vLLM and uvicorn close a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0
#: Statuses of a server that is not there behind its front.
GONE = (502, 503, 504)
OVERLOADED = (408, 429)


class Http:
    """Connections are made when they are first needed, in the loop that needs them."""

    def __init__(self, config: APIServerConfig) -> None:
        self.base = (config.base_url or os.environ.get("OPENAI_BASE_URL") or OFFICIAL_URL).rstrip("/")
        self.root = self.base.removesuffix("/v1")
        key = config.api_key or ("" if config.base_url else os.environ.get("OPENAI_API_KEY"))
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._timeout = float(config.timeout)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def post(
        self, url: str, body: Any, *, headers: dict[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON of a 200."""
        data = orjson.dumps(plain(body), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        return _read(url, *await self._sent("POST", url, data, headers, timeout))

    async def get(self, url: str, timeout: float) -> Any:
        """The JSON of a 200."""
        return _read(url, *await self._sent("GET", url, None, None, timeout))

    async def trouble(self, url: str, timeout: float) -> str | None:
        """Why a GET is not answered within so many seconds by anything but 5xx; None where it is."""
        try:
            status, answer = await self._sent("GET", url, None, None, timeout)
        except Unavailable as error:
            return str(error)
        return str(_failure(url, status, answer)) if status >= 500 else None

    async def _sent(
        self, method: str, url: str, data: bytes | None, headers: dict[str, str] | None, timeout: float | None
    ) -> tuple[int, bytes]:
        limit = aiohttp.ClientTimeout(total=timeout or self._timeout, sock_connect=CONNECT_S)
        try:
            async with self._open().request(method, url, data=data, headers=headers, timeout=limit) as response:
                return response.status, await response.read()
        except TimeoutError as error:
            raise Unavailable(f"{url} did not answer within {limit.total:g} s", "overloaded") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{url} cannot be reached: {str(error) or type(error).__name__}", "down") from error

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            # How many there are at once is decided by who has a place, not here.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session, self._loop = aiohttp.ClientSession(connector=connector, headers=self._headers), loop
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _read(url: str, status: int, answer: bytes) -> Any:
    if status != 200:
        raise _failure(url, status, answer)
    try:
        return orjson.loads(answer)
    except orjson.JSONDecodeError as error:
        raise Unavailable(f"{url} answered what is no JSON: {shown(answer)}") from error


def _failure(url: str, status: int, answer: bytes) -> Unavailable | RequestRefused:
    said = f"{url} answered {status}: {_words(answer)}"
    if status in OVERLOADED:
        return Unavailable(said, "overloaded")
    if status >= 500:
        return Unavailable(said, "down" if status in GONE else "failed")
    if status == 404:
        said += "; base_url is the address up to the version, such as http://host:port/v1"
    return RequestRefused(said, status)


def _words(answer: bytes) -> str:
    """What an error's body says."""
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return shown(answer.decode(errors="replace"), 500)
    error = body.get("error", body) if isinstance(body, dict) else body
    found = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    return shown(found if isinstance(found, str) else body, 500)
