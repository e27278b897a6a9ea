"""What `headrace bench api` puts on a server: the sizes of a run, the groups that are posted, the client that posts
them, and the two servers that take them, ours and the original where it is installed.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from isal import isal_zlib

from headrace.bench.server_process import ServerProcess
from headrace.files import cache_folder


@dataclass(frozen=True, slots=True)
class ApiSizes:
    """The sizes of a group and of a queue belong to the meaning of the figures; rounds only make medians steadier."""

    name: str
    envs: int = 4
    connections: int = 8
    group_size: int = 8
    tokens: int = 1024
    batch_size: int = 128

    flow_groups: int = 320
    flow_rounds: int = 5

    few_groups: int = 1_000
    many_groups: int = 20_000
    many_shared_groups: int = 8_000
    flat_tokens: int = 64
    flat_rounds: int = 200
    share: float = 0.1

    kept_groups: int = 2_000


FULL = ApiSizes("full")
QUICK = ApiSizes("quick", flow_groups=96, flow_rounds=3, flat_tokens=16, flat_rounds=60, kept_groups=600)


#: How many groups differ in more than their first token.
DIFFERENT_GROUPS = 32
VOCABULARY = 150_000
_NUMBER = "@number@"


class GroupBodies:
    """Bodies of `size` sequences of `tokens` tokens: a quarter prompt, labels and log-probs as environments do it."""

    def __init__(self, size: int, tokens: int) -> None:
        rng = random.Random(0)
        self._texts = [
            tuple(json.dumps(_group(rng, size, tokens)).replace(f'"{_NUMBER}"', _NUMBER).split(_NUMBER))
            for _ in range(DIFFERENT_GROUPS)
        ]
        self._packed: dict[tuple[int, int], bytes] = {}

    def body(self, number: int, env: int) -> bytes:
        """The group whose first token is `number`."""
        before, between, after = self._texts[number % DIFFERENT_GROUPS]
        return f"{before}{number}{between}{env}{after}".encode()

    def packed(self, number: int, env: int) -> bytes:
        """As environments pack it; packed once, since that takes longer than whatever is measured."""
        if (number, env) not in self._packed:
            self._packed[number, env] = gzip.compress(self.body(number, env))
        return self._packed[number, env]


def _group(rng: random.Random, size: int, tokens: int) -> dict[str, Any]:
    """With places for the number and the environment."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(tokens // 4)]
    answers = [[rng.randrange(VOCABULARY) for _ in range(tokens - len(prompt))] for _ in range(size)]
    sequences: list[list[Any]] = [prompt + answer for answer in answers]
    sequences[0] = [_NUMBER, *sequences[0][1:]]
    return {
        "tokens": sequences,
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [round(rng.gauss(0, 1), 4) for _ in range(size)],
        "inference_logprobs": [
            [1.0] * len(prompt) + [round(-rng.expovariate(2.0), 6) for _ in answer] for answer in answers
        ],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": None,
        "env_id": _NUMBER,
    }


CALL_TIMEOUT = aiohttp.ClientTimeout(total=600)
JSON = {"content-type": "application/json"}
#: Connections that were idle for longer are not used again: the original closes them after five seconds.
KEEP_ALIVE_S = 2.0
_GZIP = 31


class BenchApiClient:
    """Times are to an answer's last byte; what is unpacked or parsed is so after it."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address
        self.took = 0.0  # seconds of the last call

    async def call(self, method: str, path: str, **more: Any) -> bytes:
        """The body of an answer, unpacked. Raises where the status is not 200; `took` has its seconds."""
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
        """The JSON of an answer."""
        return orjson.loads(await self.call(method, path, **more))

    async def open(self, sizes: ApiSizes, *, share: float | None = None) -> list[int]:
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
        """Posts groups, `at_once` in a list."""
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
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session that leaves answers packed, as they were sent."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(timeout=CALL_TIMEOUT, auto_decompress=False, connector=connector) as session:
        yield session


#: Names the Python of an environment with atroposlib, where it is not the one that the tests made.
PYTHON_VARIABLE = "HEADRACE_ATROPOS_PYTHON"
ORIGINAL_ABSENT = (
    f"the original is not installed: ours is measured alone; `make test-atropos` installs it, or {PYTHON_VARIABLE} "
    "names the Python that has atroposlib 0.4.0"
)


def original_python() -> Path | None:
    """The Python that has atroposlib: the one that is named, or the newest that the tests made in the user's cache."""
    if named := os.environ.get(PYTHON_VARIABLE):
        return Path(named)
    found = [path for path in (cache_folder() / "venvs").glob("atropos-*/bin/python") if ".part" not in str(path)]
    return max(found, key=lambda path: path.parent.stat().st_mtime, default=None)


def start_original(python: Path) -> ServerProcess:
    """atroposlib's server, on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", port)
    return ServerProcess("atroposlib.cli.run_api", *where, python=python, address=f"http://127.0.0.1:{port}")


def start_ours(journal: Path) -> ServerProcess:
    """`headrace api` with a journal."""
    return ServerProcess("headrace", "api", "--host", "127.0.0.1", "--port", 0, "--journal", journal)
