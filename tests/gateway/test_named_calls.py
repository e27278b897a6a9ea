"""Who carries out a named call keeps others from it: other processes while it does, and no longer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from headrace.gateway.named_calls import NamedCalls

#: Another worker: takes the lock of a call, says so, and keeps it until it is killed.
KEEPS = """
import asyncio, sys
from pathlib import Path
from headrace.gateway.named_calls import NamedCalls

async def keep():
    async with NamedCalls(Path(sys.argv[1])).alone("acme", "/path", "digest"):
        print("has it", flush=True)
        await asyncio.Event().wait()

asyncio.run(keep())
"""


async def test_a_call_waits_for_another_process_until_that_one_dies(tmp_path: Path) -> None:
    path = tmp_path / "named_calls"
    calls = NamedCalls(path)
    keeper = subprocess.Popen([sys.executable, "-c", KEEPS, str(path)], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    try:
        assert await asyncio.to_thread(keeper.stdout.readline) == "has it\n"
        begun = asyncio.Event()

        async def same() -> None:
            async with calls.alone("acme", "/path", "digest"):
                begun.set()

        waiting = asyncio.create_task(same())
        for name in (("acme", "/path", "other"), ("beta", "/path", "digest"), ("acme", "/other", "digest")):
            async with calls.alone(*name):  # what is not the same call does not wait
                assert not begun.is_set()
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
    await waiting
    assert begun.is_set()


async def test_tries_in_one_process_share_the_lock_until_the_last_of_them_ends(tmp_path: Path) -> None:
    path = tmp_path / "named_calls"
    calls = NamedCalls(path)
    async with calls.alone("call"):
        async with calls.alone("call"):
            pass
        taken = await asyncio.to_thread(is_taken_elsewhere, path)
        assert taken, "the first of them is still at it"
    assert not await asyncio.to_thread(is_taken_elsewhere, path)


def is_taken_elsewhere(path: Path) -> bool:
    """Whether another process is kept from the call."""
    tries = "import sys; from pathlib import Path; from headrace.gateway.named_calls import NamedCalls, place_of\n"
    tries += "calls = NamedCalls(Path(sys.argv[1])); print(calls.take(place_of('call')))"
    done = subprocess.run([sys.executable, "-c", tries, str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "False"
