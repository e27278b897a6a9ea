"""What speaks to a server: calls that must succeed, and the opening of a run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from isal import isal_zlib

from headrace.bench.api.sizes import Sizes

PATIENCE = aiohttp.ClientTimeout(total=600)
JSON = {"content-type": "application/json"}
#: Connections that were idle for longer are not used again: the original closes them after five seconds.
IDLE_S = 2.0
_GZIP = 31


class Client:
    """Times are to an answer's last byte; what is unpacked or parsed is so after it."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address
        self.took = 0.0  # seconds of the last call

    async def call(self, method: str, path: str, **more: Any) -> bytes:
        begun = time.perf_counter()
        async with self._session.request(method, self._address + path, **more) as answer:
            body = await answer.read()
            self.took = time.perf_counter() - begun
        if answer.headers.get("content-encoding") == "gzip":
            body = isal_zlib.decompress(body, _GZIP)
        if answer.status != 200:
            raise RuntimeError(f"{method} {path} was answered with {answer.status}: {body[:500]!r}")
        return body

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        return orjson.loads(await self.call(method, path, **more))

    async def open(self, sizes: Sizes, *, share: float | None = None) -> list[int]:
        """An empty server with a trainer that has asked for its first batch; the environments' ids."""
        await self.call("GET", "/reset_data")
        settings = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": "checkpoints", "starting_step": 0}
        settings |= {"save_checkpoint_interval": 100, "num_steps": 1_000_000, "max_token_len": 4096}
        await self.ask("POST", "/register", json={**settings, "batch_size": sizes.batch_size})
        await self.ask("GET", "/batch")
        env = {"max_token_length": 4096, "desired_name": "bench", "weight": 1.0, "group_size": sizes.group_size}
        if share is not None:
            env["min_batch_allocation"] = share
        return [(await self.ask("POST", "/register-env", json=env))["env_id"] for _ in range(sizes.envs)]

    async def fill(self, bodies: Iterable[bytes], at_once: int = 50) -> None:
        waiting: list[bytes] = []
        for body in bodies:
            waiting.append(body)
            if len(waiting) == at_once:
                await self._post_list(waiting)
                waiting = []
        if waiting:
            await self._post_list(waiting)

    async def _post_list(self, bodies: list[bytes]) -> None:
        await self.call("POST", "/scored_data_list", data=b"[%b]" % b",".join(bodies), headers=JSON)


@asynccontextmanager
async def speaking() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    async with aiohttp.ClientSession(timeout=PATIENCE, auto_decompress=False, connector=connector) as session:
        yield session
