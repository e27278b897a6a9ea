"""`connect` by a unix socket's path: the pool of a process on the same machine."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvicorn
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.pool.kit import SOON, Threads, group, prompts, until_blocked

from headrace import DataPool, connect
from headrace.pool.errors import PoolUnreachable
from headrace.pool.frame_server import serve_frames
from headrace.pool.frame_transport import HEAD, FrameReader, FrameTransport
from headrace.pool.http import create_app
from headrace.pool.remote import Unreachable
from headrace.pool.wire import decode_reply, encode_call


@pytest.fixture
def served() -> Iterator[DataPool]:
    with DataPool() as found:
        yield found


@pytest.fixture
def socket_path() -> Iterator[str]:
    """In a folder of its own, because a socket's path must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder) / "pool.sock")


@pytest.fixture(params=["unix", "frames"])
def address(served: DataPool, socket_path: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where `served` answers."""
    if request.param == "frames":
        with frames(served, socket_path):
            yield f"frames://{socket_path}"
        return
    config = uvicorn.Config(create_app(served), uds=socket_path, log_level="warning", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.001)
        assert thread.is_alive(), "the pool is not served"
    yield f"unix://{socket_path}"
    server.should_exit = True
    thread.join(SOON)


@contextmanager
def frames(pool: DataPool, path: str) -> Iterator[None]:
    """Serves a pool without HTTP, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(serve_frames(pool, path, str), loop).result(SOON)
    yield
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
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


@pytest.mark.parametrize("scheme", ["unix", "frames"])
async def test_a_socket_that_nobody_listens_on_is_named(scheme: str) -> None:
    with connect(f"{scheme}:///nowhere/pool.sock", retry_s=0) as pool:
        with pytest.raises(PoolUnreachable, match="/nowhere/pool"):
            pool.stats()
        with pytest.raises(PoolUnreachable, match="/nowhere/pool"):
            await pool.aio.stats()


async def test_a_caller_that_leaves_takes_no_batch(served: DataPool, address: str) -> None:
    pool = connect(address, retry_s=1)
    waiting = asyncio.create_task(pool.aio.fetch_batch(1))
    while served.stats()["waiting"] < 1:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    while served.stats()["waiting"]:
        await asyncio.sleep(0)
    assert (await pool.aio.submit_steps(group("p", 2))).accepted == 2
    assert prompts(await pool.aio.fetch_batch(1, timeout=SOON)) == ["p"], "the one that left has it"
    await pool.aclose()


@pytest.mark.parametrize("waiting", [0, 1], ids=["nothing there", "a group there"])
async def test_a_caller_whose_leaving_comes_together_with_its_call_takes_no_batch(
    served: DataPool, socket_path: str, waiting: int
) -> None:
    """As where the pool's event loop was busy while both came."""
    served.submit_steps([one for at in range(waiting) for one in group(f"p{at}")])
    with frames(served, socket_path):
        reader, writer = await asyncio.open_unix_connection(socket_path)
        answers, found = FrameReader(), dict[int, bytes]()

        async def stats(number: int) -> Any:
            body = encode_call("stats", {"channel": None})
            writer.write(HEAD.pack(len(body), number) + body)
            while number not in found:
                found.update(answers.feed(await reader.read(1 << 20)))
            return decode_reply(found[number])

        fetch = encode_call("fetch", {"batch_size": 1, "timeout": SOON, "pieces": True})
        writer.write(HEAD.pack(len(fetch), 1) + fetch + HEAD.pack(0, 1))
        await stats(2)
        assert (await stats(3))["waiting"] == 0
        assert list(found) == [2, 3]
        writer.close()
    served.submit_steps(group("later"))
    assert prompts(served.fetch_batch(waiting + 1, timeout=0)) == [*(f"p{at}" for at in range(waiting)), "later"]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_connection_that_is_lost_as_it_opens_is_said_to_be_so_at_once(
    socket_path: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Its end is there before the caller that waited for it goes on."""

    class Losing(FrameTransport):
        async def _open(self) -> Any:
            connection = await super()._open()
            listening.accept()[0].close()
            while connection.usable:
                await asyncio.sleep(0)
            return connection

    async def ask() -> None:
        with pytest.raises(Unreachable, match="was closed"):
            await Losing(socket_path).acall("stats", b"frame", 1.0)

    with socket.socket(socket.AF_UNIX) as listening, asyncio.Runner(loop_factory=loop) as runner:
        listening.bind(socket_path)
        listening.listen()
        runner.run(ask())


async def test_calls_at_once_each_get_their_own_answer(address: str) -> None:
    pool = connect(address, retry_s=1)
    await asyncio.gather(*(pool.aio.submit_steps(group(f"p{at}", 1)) for at in range(50)))
    found = await asyncio.gather(*(pool.aio.trajectory(f"p{at}/0") for at in range(50)))
    assert [trajectory.prompt_uid for trajectory in found] == [f"p{at}" for at in range(50)]
    await pool.aclose()


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=40)), max_size=8), st.randoms(use_true_random=False)
)
def test_any_chunking_gives_the_same_frames(sent: list[tuple[int, bytes]], random: Random) -> None:
    data = b"".join(HEAD.pack(len(frame), number) + frame for number, frame in sent)
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(0, 12)))
    reader, found = FrameReader(), []
    for begin, end in pairwise([0, *cuts, len(data)]):
        found += reader.feed(data[begin:end])
    assert found == sent


def test_a_client_that_was_not_asked_for_loads_no_transport() -> None:
    loaded = "import sys; import headrace.pool.connect; print([m for m in ('aiohttp', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
