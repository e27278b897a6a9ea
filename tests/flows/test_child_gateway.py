"""The gateway as a child: at one address in all of its lives, and gone with its parent."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client

from headrace.data.errors import HeadraceError
from headrace.flows import child_gateway
from headrace.flows.child_gateway import ChildGateway
from headrace.flows.gateway_client import GatewayClient
from headrace.flows.task import Task


def flags(engine: Client, folder: Path, **more: Any) -> dict[str, Any]:
    return {"vllm_addresses": f"http://{engine.host}", "tokenizer_path": folder, **more}


@asynccontextmanager
async def kept(child: ChildGateway) -> AsyncIterator[asyncio.Task[None]]:
    """The child is kept running while the block lasts."""
    keeping = asyncio.create_task(child.keep())
    try:
        with child:
            yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def until_ready(client: GatewayClient) -> None:
    async with asyncio.timeout(300):
        while not await client.ready():
            await asyncio.sleep(0.05)


@pytest.mark.system
@pytest.mark.asyncio
async def test_one_that_is_killed_comes_back_at_its_address_with_what_it_had(
    engine: Client, folder: Path, tmp_path: Path
) -> None:
    child = ChildGateway(flags(engine, folder, journal=tmp_path / "journal", api_key="secret"), tmp_path)
    async with kept(child):
        address = await asyncio.to_thread(child.listening)
        client = GatewayClient(address, "secret", patience_s=300)
        await until_ready(client)
        task = Task(row={}, prompt_uid="p", rollout=0, n_rollouts=1)
        handle = await client.init_trajectory(task)
        os.kill(child.pid, signal.SIGKILL)
        assert (await client.fail(handle, "asked of its next life")).status == "ok"
        assert child.starts == 2
        assert await asyncio.to_thread(child.listening) == address
        await client.aclose()
    assert "secret" not in child.log.read_text()


@pytest.mark.asyncio
async def test_one_that_cannot_live_is_told_with_its_words_and_given_up(
    engine: Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_gateway, "MAX_STILLBORN", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child = ChildGateway(flags(engine, folder, port=taken.getsockname()[1]), tmp_path)
        async with kept(child) as keeping:
            with pytest.raises(HeadraceError, match="gateway ended with code 1; it said: cannot listen on 127"):
                await asyncio.to_thread(child.listening)
            with pytest.raises(HeadraceError, match="cannot listen on 127"):
                await asyncio.wait_for(keeping, 300)
    assert child.starts == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_it_ends_with_a_parent_that_is_killed(engine: Client, folder: Path, tmp_path: Path) -> None:
    script = (
        "import pathlib, time; from headrace.flows.child_gateway import ChildGateway\n"
        f"child = ChildGateway({ {k: str(v) for k, v in flags(engine, folder).items()}!r}, "
        f"pathlib.Path({str(tmp_path)!r})).__enter__()\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    watched = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert select.select([watched], [], [], 120)[0] == [watched]
    os.close(watched)
