"""Fifty environments and thousands of posts: nothing fails, and what was served is no longer held."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.atropos.words import environment, registration

from headrace.bench.server_process import ServerProcess

ENVIRONMENTS = 50
#: Bytes of a group's numbers, however they are packed.
PACKED = 2_000

JSON = {"content-type": "application/json"}
_RANDOM = random.Random(0)
#: Written once, so that the posts cost the server more than whoever sends them.
_ROW = ",".join(str(_RANDOM.randrange(100_000)) for _ in range(512))
_FIRST = re.compile(rb'"tokens":\[\[(\d+)')


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        "headrace", "api", "--host", "127.0.0.1", "--port", 0, "--journal", tmp_path / "journal"
    ) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("waves", [80, pytest.param(200, marks=pytest.mark.long)])
def test_nothing_fails_and_memory_is_flat_while_the_trainer_keeps_up(server: ServerProcess, waves: int) -> None:
    begun = waves // 4  # after which the server has all that it needs to go on
    grown, served = asyncio.run(run(server, waves, begun))
    assert sorted(served) == list(range(waves * ENVIRONMENTS))
    assert grown < (waves - begun) * ENVIRONMENTS * PACKED / 2, "what was served is held no longer"


async def run(server: ServerProcess, waves: int, begun: int) -> tuple[int, list[int]]:
    """By how many bytes the server grew after so many waves, and the groups that the trainer got in all of them. A wave
    is one post of every environment, all at once, and a trainer that takes all of it."""
    served: list[int] = []
    before = 0
    async with aiohttp.ClientSession(server.address, connector=aiohttp.TCPConnector(limit=0)) as session:
        await ask(session, "POST", "/register", encoded(registration(batch_size=ENVIRONMENTS * 2)))
        assert await ask(session, "GET", "/batch") == b'{"batch":null}'
        joined = [await ask(session, "POST", "/register-env", encoded(environment(2))) for _ in range(ENVIRONMENTS)]
        envs = [json.loads(answer)["env_id"] for answer in joined]
        for wave in range(waves):
            if wave == begun:
                before = server.memory()
            first = wave * ENVIRONMENTS
            posts = (ask(session, "POST", "/scored_data", group(first + n, env)) for n, env in enumerate(envs))
            assert set(await asyncio.gather(*posts)) == {b'{"status":"received"}'}
            served += map(int, _FIRST.findall(await ask(session, "GET", "/batch")))
        status = json.loads(await ask(session, "GET", "/status"))
        assert status == {"current_step": waves, "queue_size": 0}
        return server.memory() - before, served


async def ask(session: aiohttp.ClientSession, method: str, path: str, body: bytes | None = None) -> bytes:
    async with session.request(method, path, data=body, headers=JSON) as answer:
        found = await answer.read()
        assert answer.status == 200, found
        return found


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def group(number: int, env: int) -> bytes:
    """One of two sequences whose first token is its number."""
    rows = f"[[{number},{_ROW}],[{number},{_ROW}]]"
    return f'{{"tokens":{rows},"masks":{rows},"scores":[0.0,1.0],"env_id":{env}}}'.encode()
