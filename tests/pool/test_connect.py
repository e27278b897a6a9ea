"""`connect` by a unix socket's path: the pool of a process on the same machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from tests.pool.kit import SOON, Threads, group, prompts, until_blocked

from headrace import DataPool, connect
from headrace.pool.errors import PoolUnreachable
from headrace.pool.http import create_app


@pytest.fixture
def served() -> Iterator[DataPool]:
    with DataPool() as found:
        yield found


@pytest.fixture
def address(served: DataPool) -> Iterator[str]:
    """Where `served` answers; a folder of its own, because a socket's path must be short."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "pool.sock")
        config = uvicorn.Config(create_app(served), uds=path, log_level="warning", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.001)
            assert thread.is_alive(), "the pool is not served"
        yield f"unix://{path}"
        server.should_exit = True
        thread.join(SOON)


def test_a_pool_on_a_unix_socket_is_a_pool_like_any_other(served: DataPool, address: str, threads: Threads) -> None:
    with connect(address, retry_s=1) as pool:
        waiting = threads.submit(pool.fetch_batch, 1)
        until_blocked(served)
        assert pool.submit_steps(group("p", 2)).accepted == 2
        assert prompts(waiting.result(SOON)) == ["p"]
        assert pool.stats()["ledger"] == served.stats()["ledger"]


async def test_it_can_be_awaited_too(served: DataPool, address: str) -> None:
    pool = connect(address, retry_s=1)
    waiting = asyncio.create_task(pool.aio.fetch_batch(1))
    while served.stats()["waiting"] < 1 and not waiting.done():
        await asyncio.sleep(0)
    assert (await pool.aio.submit_steps(group("p", 2))).accepted == 2
    assert prompts(await waiting) == ["p"]
    await pool.aclose()


def test_a_socket_that_nobody_listens_on_is_named() -> None:
    with connect("unix:///nowhere/pool.sock", retry_s=0) as pool, pytest.raises(PoolUnreachable, match="/nowhere/pool"):
        pool.stats()


def test_a_client_that_was_not_asked_for_loads_no_transport() -> None:
    loaded = "import sys; import headrace.pool.connect; print([m for m in ('aiohttp', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
