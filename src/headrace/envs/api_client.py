"""The Trajectory API, as an environment asks it: JSON over one kept session.

`ApiAway` passes: there was no answer, or one that says to try again. `ApiRefused` would be the same another time.
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp
import orjson
from isal import igzip

from headrace.data.errors import HeadraceError, shown

#: Where the key comes from when the configuration has none.
KEY_VARIABLE = "HEADRACE_API_KEY"
#: Bodies from this size on are compressed.
GZIP_FROM = 1024
#: Refusals of what was sent. Any other 4xx is about who or where we are, which an operator may put right.
FINAL = frozenset({400, 413, 415, 422})

_TIMEOUT = aiohttp.ClientTimeout(total=60, sock_connect=10)


class ApiError(HeadraceError):
    """The API did not do what it was asked."""

    code = "trajectory_api"
    status: int | None = None


class ApiAway(ApiError):
    """It may do so later."""

    code = "trajectory_api_away"


class ApiRefused(ApiError):
    """It never will: `status` is its answer's."""

    code = "trajectory_api_refused"


class ApiClient:
    """One API. Connects when it is first asked."""

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address = address.rstrip("/")
        key = key or os.environ.get(KEY_VARIABLE)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, body: Any = None) -> dict[str, Any]:
        return await self._ask("GET", path, b"" if body is None else orjson.dumps(body), {})

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        return await self._ask("POST", path, orjson.dumps(body), {})

    async def post_groups(self, path: str, body: bytes, key: str) -> dict[str, Any]:
        """Posts JSON that is ready made. The same `key` another time is the same post."""
        headers = {"idempotency-key": key}
        if len(body) >= GZIP_FROM:
            body = igzip.compress(body, 1)
            headers["content-encoding"] = "gzip"
        return await self._ask("POST", path, body, headers)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=_TIMEOUT)
        if body:
            headers = {"content-type": "application/json", **headers}
        try:
            async with self._session.request(method, self.address + path, data=body or None, headers=headers) as answer:
                status, data = answer.status, await answer.read()
        except TimeoutError as error:
            raise ApiAway(f"{self.address} did not answer {path} within {_TIMEOUT.total:g} s") from error
        except aiohttp.InvalidURL as error:
            raise ApiRefused(f"rollout_server_url {self.address!r} is no http://HOST:PORT") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiAway(
                f"{self.address} cannot be reached for {path}: {str(error) or type(error).__name__}"
            ) from error
        if status == 200:
            return _object(data, f"{self.address}{path}")
        kind = ApiRefused if status in FINAL else ApiAway
        failure = kind(f"{self.address} answered {path} with {status}: {data[:300].decode(errors='replace')}")
        failure.status = status
        raise failure


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiAway(f"{where} answered with what is no JSON: {shown(data)}") from error
    if not isinstance(found, dict):
        raise ApiAway(f"{where} answered with {type(found).__name__}, not with an object: {shown(found)}")
    return found
