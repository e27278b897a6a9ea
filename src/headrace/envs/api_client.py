"""The Trajectory API's client of an environment: JSON over one HTTP session, and registration.

`ApiAway` is temporary: there was no response, or one that says to try again. `ApiRefused` would be refused every time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import orjson
from isal import igzip

from headrace.data.errors import HeadraceError, shown
from headrace.data.keys import configured_key
from headrace.envs.types import BaseEnvConfig
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import JSON_TYPE, BadAddress, NoAnswer

log = logging.getLogger("headrace.envs")

T = TypeVar("T")

#: Environment variables of the key, where the configuration has none: a gateway that has keys asks for its admin's.
KEY_VARIABLES = ("HEADRACE_ADMIN_KEY", "HEADRACE_API_KEY")
#: Bodies of at least so many bytes are compressed; smaller ones gain nothing.
GZIP_MIN_BYTES = 1024
#: Statuses that refuse the body itself. Other 4xx are about a key or an address, which an operator may correct.
FINAL_STATUSES = frozenset({400, 413, 415, 422})
#: Seconds that a request may take, and that connecting may.
REQUEST_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0


class ApiError(HeadraceError):
    """A request to the API failed; `status` is its response's, None without one."""

    code = "trajectory_api"
    status: int | None = None


class ApiAway(ApiError):
    """Temporary: the request may succeed later."""

    code = "trajectory_api_away"


class ApiRefused(ApiError):
    """Final: the same request would be refused again."""

    code = "trajectory_api_refused"


class ApiClient:
    """Requests to one API, over connections that are opened when first needed. All raise `ApiError`."""

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address = address.rstrip("/")
        self._client = AsyncHttpClient(
            self.address,
            total_s=REQUEST_TIMEOUT_S,
            connect_s=CONNECT_TIMEOUT_S,
            key=configured_key(key, *KEY_VARIABLES),
        )

    async def get(self, path: str, body: Any = None) -> dict[str, Any]:
        return await self._ask("GET", path, b"" if body is None else orjson.dumps(body), {})

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        return await self._ask("POST", path, orjson.dumps(body), {})

    async def post_groups(self, path: str, body: bytes, key: str) -> dict[str, Any]:
        """Posts encoded JSON; a second post with the same idempotency `key` changes nothing."""
        headers = {"idempotency-key": key}
        if len(body) >= GZIP_MIN_BYTES:
            body = igzip.compress(body, 1)
            headers["content-encoding"] = "gzip"
        return await self._ask("POST", path, body, headers)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        if body:
            headers = {"content-type": JSON_TYPE, **headers}
        try:
            answer = await self._client.request(method, path, body or None, headers=headers)
        except BadAddress as error:
            raise ApiRefused(f"rollout_server_url {self.address!r} is no http://HOST:PORT") from error
        except NoAnswer as error:
            raise ApiAway(str(error)) from error
        status, data = answer.status, answer.body
        if status == 200:
            return _object(data, f"{self.address}{path}")
        kind = ApiRefused if status in FINAL_STATUSES else ApiAway
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


class RegistrationReply(msgspec.Struct, frozen=True):
    """The API's response to a registration: this environment's id and name, and where the trainer is."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int = -1


class NoTrainer(ApiAway):
    """The API answers, but no trainer has begun."""

    code = "no_trainer"


async def register(api: ApiClient, config: BaseEnvConfig, name: str) -> RegistrationReply:
    """Registers, once the API answers and the trainer has begun; waits until then."""
    asked = {
        "max_token_length": config.max_token_length,
        "desired_name": name,
        "weight": config.inference_weight,
        "min_batch_allocation": config.min_batch_allocation,
        "group_size": config.group_size,
    }

    async def once() -> RegistrationReply:
        found = await api.post("/register-env", asked)
        if found.get("status") != "success":
            raise NoTrainer(
                f"no trainer has asked {api.address} for its first batch yet; start one, such as `headrace train` on "
                "the channel that the server was given as --serve-channel (docs/environments.md, A trainer for it)"
            )
        if found.get("warning"):
            log.warning("%s registered this environment, and says: %s", api.address, found["warning"])
        return _read(api, found)

    return await retry_until_answered(once, config.status_poll_s)


async def retry_until_answered(ask: Callable[[], Awaitable[T]], every_s: float) -> T:
    """The result of `ask`, called every so many seconds while it raises `ApiAway`. Each new reason is logged once."""
    said = ""
    while True:
        try:
            return await ask()
        except ApiAway as error:
            if str(error) != said:
                what = "a trainer" if isinstance(error, NoTrainer) else "the Trajectory API (headrace api starts one)"
                log.info("waiting for %s: %s", what, error)
            said = str(error)
        await asyncio.sleep(every_s)


def _read(api: ApiClient, found: dict[str, Any]) -> RegistrationReply:
    try:
        return msgspec.convert(found, RegistrationReply, strict=False)
    except msgspec.ValidationError as error:
        raise ApiRefused(f"{api.address} answered /register-env with {found}: {error}") from error
