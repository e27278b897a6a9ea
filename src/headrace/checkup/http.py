"""How a checkup speaks to a server: JSON out, JSON or events back, one call at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from headrace.gateway.upstream.http_client import SseDecoder

DONE = b"[DONE]"


class OutOfReach(Exception):
    """Nothing can be found out: nobody answers, or nobody lets us in."""


class Refused(Exception):
    """A call that was answered with an error."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """`events` are the data of a stream's events, `DONE` among them; None for a whole answer."""

    body: Any
    events: list[bytes] | None
    headers: Mapping[str, str]


class Http:
    """One server's connection. `key` goes along as OpenAI's and as Anthropic's clients send it."""

    def __init__(self, key: str | None, timeout_s: float) -> None:
        self._headers = {"anthropic-version": "2023-06-01", "user-agent": "headrace-check-gateway"}
        if key:
            self._headers |= authorization(key)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Http:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, read_bufsize=1 << 20)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> Reply:
        return await self._ask("GET", url, None, headers)

    async def post(self, url: str, body: Any = None) -> Reply:
        return await self._ask("POST", url, body, None)

    async def _ask(self, method: str, url: str, body: Any, headers: Mapping[str, str] | None) -> Reply:
        assert self._session is not None
        sent = None if body is None else orjson.dumps(body)
        more = {**(headers or {}), **({"content-type": "application/json"} if sent is not None else {})}
        try:
            async with self._session.request(method, url, data=sent, headers=more, allow_redirects=False) as answer:
                data = await answer.read()
                kind = answer.headers.get("content-type", "")
                status, found = answer.status, dict(answer.headers)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OutOfReach(f"{url}: {str(error) or type(error).__name__}") from error
        if status != 200:
            raise Refused(status, _said(data))
        named = {name.lower(): value for name, value in found.items()}
        if kind.startswith("text/event-stream"):
            events = SseDecoder()
            return Reply(None, events.feed(data + b"\n\n"), named)
        return Reply(_json(data), None, named)


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "x-api-key": key}


def _said(data: bytes) -> str:
    """The message in an error's body, whatever its shape."""
    found = _json(data)
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return " ".join((found if isinstance(found, str) else data.decode(errors="replace")).split())[:200]


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return None
