"""An environment as a process of its own that is told to end, or is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import items_of

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def start(api: Api) -> AsyncIterator[Start]:
    begun: list[asyncio.subprocess.Process] = []

    async def one(**given: Any) -> asyncio.subprocess.Process:
        settings = {"api": api.address, "status_poll_s": 0.02, **given}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.envs.child", json.dumps(settings)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))},
            stdout=asyncio.subprocess.PIPE,
        )
        begun.append(process)
        return process

    yield one
    for process in begun:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # to the end of what it said, with which its pipe is closed


async def until(api: Api, process: asyncio.subprocess.Process, holds: Callable[[], bool]) -> None:
    """Returns once something holds, looked at whenever the API was asked for anything; fails where the environment ends
    before."""
    held, ended = asyncio.ensure_future(api.until(holds)), asyncio.ensure_future(process.wait())
    await asyncio.wait([held, ended], return_when=asyncio.FIRST_COMPLETED)
    assert held.done(), f"the environment ended with {process.returncode}"
    ended.cancel()


def places(spool: Path) -> list[int]:
    """Which posts are owed, by their place in the line."""
    return sorted(int(path.name.partition("-")[0]) for path in spool.glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_ends_cleanly_with_everything_sent(api: Api, start: Start, number: signal.Signals) -> None:
    process = await start(first=0)
    await until(api, process, lambda: len(api.received) >= 10)
    process.send_signal(number)
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert sorted(items_of(api.received)) == list(range(int(said)))
    assert api.left == [0]


async def test_killed_its_successor_sends_what_it_owed_and_once(api: Api, start: Start, tmp_path: Path) -> None:
    api.refuse = lambda groups: None if items_of(groups) == [0] else 503
    killed = await start(first=0, most=4, spool_dir=str(tmp_path), max_num_workers=1)
    await until(api, killed, lambda: places(tmp_path) == [1, 2, 3] and items_of(api.received) == [0])
    killed.kill()
    await killed.wait()
    api.refuse = lambda groups: None
    await start(first=10, most=12, spool_dir=str(tmp_path), max_num_workers=1)
    await api.until(lambda: len(api.received) == 6)
    assert items_of(api.received) == [0, 1, 2, 3, 10, 11]
    assert len(api.keys) == 6
