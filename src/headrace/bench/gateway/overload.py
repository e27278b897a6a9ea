"""Three times as many calls as a gateway takes, among idle connections by the thousand and agents that do not read.

What is to be seen: calls that were taken finish, each as one step; the others hear at once that they should come back;
whoever asks for the gateway's health is answered; and memory stays within its bound.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import aiohttp
import orjson
import uvloop

from headrace.bench.gateway.live_streams import MANY_FILES, begin_trajectories, p99
from headrace.bench.gateway.load import GatewaySizes, speech, words_from
from headrace.bench.gateway.paced import start_paced_stub
from headrace.bench.gateway.servers import ready, start_gateway
from headrace.bench.report import Figures
from headrace.bench.server_process import ServerProcess
from headrace.net.server import allow_files

#: How many times as many calls come as are taken at once.
TIMES = 3
#: What calls may hold: less than a third of them would with `--max-in-flight` alone.
MEMORY_MB = 64
PROMPT_WORDS = 60
#: The share of a stream's time in which all calls come, so that the first ones are under way when the last one does.
ARRIVAL_SHARE = 0.3
#: Seconds between two questions for its health.
HEALTH_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class OverloadedCall:
    """One call: its status, whether its answer came whole, and seconds until the answer's head."""

    status: int
    whole: bool
    head_s: float


def overload(sizes: GatewaySizes, folder: Path) -> Figures:
    """`overload_*`: what becomes of calls, health checks and memory."""
    allow_files(MANY_FILES)
    flags = ("--max-in-flight", sizes.overload_calls, "--memory-mb", MEMORY_MB)
    with (
        start_paced_stub(folder, sizes.overload_tokens, sizes.live_rate) as stub,
        start_gateway(stub, folder, *flags) as gateway,
    ):
        ready(gateway)
        calls = TIMES * sizes.overload_calls
        paths = uvloop.run(begin_trajectories(gateway.address, "train", calls))
        before = gateway.memory()
        found, health_s = uvloop.run(_storm(gateway.address, paths, sizes))
        grown = gateway.peak_memory() - before
        _check_steps(gateway, sum(call.whole for call in found))
    refused = [call for call in found if call.status == 503]
    taken = [call for call in found if call.status != 503]
    return Figures(
        {
            "overload_finished": sum(call.whole for call in taken) / max(1, len(taken)),
            "overload_refused": len(refused) / len(found),
            "overload_refusal_p99_ms": p99([call.head_s for call in refused] or [0.0]) * 1e3,
            "overload_health_p99_ms": p99(health_s) * 1e3,
            "overload_rss_mb": max(0, grown) / 1e6,
        },
        {"overload_calls": float(len(found)), "overload_health_max_ms": max(health_s) * 1e3},
    )


def _check_steps(gateway: ServerProcess, answered: int) -> None:
    """Raises where not each answer is one step."""
    steps = uvloop.run(_steps(gateway.address))
    if steps != answered:
        raise AssertionError(f"{answered} calls were answered and {steps} steps recorded")


async def _steps(address: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(address + "/stats") as answer:
        stats = orjson.loads(await answer.read())
        return int(stats["pool"]["channels"]["train"]["ledger"]["submitted"])


async def _storm(address: str, paths: list[str], sizes: GatewaySizes) -> tuple[list[OverloadedCall], list[float]]:
    url, said = urlsplit(address), speech()
    apart_s = ARRIVAL_SHARE * sizes.overload_tokens / sizes.live_rate / len(paths)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as idle:
        for _ in range(sizes.overload_idle):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            idle.callback(writer.close)
        begin, over = loop.time(), asyncio.Event()
        slow_over = asyncio.Event()

        async def agent(number: int) -> OverloadedCall:
            await asyncio.sleep(begin + number * apart_s - loop.time())
            reads = None if number % (len(paths) // sizes.overload_slow or 1) else slow_over
            return await _call(url, paths[number], words_from(said, number, PROMPT_WORDS), sizes.overload_tokens, reads)

        async def open_eyes() -> None:
            await asyncio.sleep(sizes.overload_tokens / sizes.live_rate)
            slow_over.set()

        probing = asyncio.create_task(_health(url, over))
        waking = asyncio.create_task(open_eyes())
        found = await asyncio.gather(*map(agent, range(len(paths))))
        await waking
        over.set()
        return list(found), await probing


async def _health(url: SplitResult, over: asyncio.Event) -> list[float]:
    """Seconds of each answer to `/health`, every one on a connection of its own, as probes ask."""
    found: list[float] = []
    loop = asyncio.get_running_loop()
    while not over.is_set():
        begun = loop.time()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % url.netloc.encode())
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise AssertionError(f"/health was answered {answer[:200]!r}")
        found.append(loop.time() - begun)
        await asyncio.sleep(HEALTH_PERIOD_S)
    return found


async def _call(url: SplitResult, path: str, text: str, tokens: int, reads: asyncio.Event | None) -> OverloadedCall:
    """One streamed call; with `reads`, its agent reads nothing behind the answer's head until then."""
    asked = {"model": "any", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
    body = orjson.dumps(asked)
    head = f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
    answered = await reader.readuntil(b"\r\n\r\n")
    head_s = loop.time() - begun
    status = int(answered.split(b" ")[1])
    if reads is not None and status == 200:
        await reads.wait()
    rest = await reader.read()
    writer.close()
    if status == 503 and b"retry-after: " not in answered:
        raise AssertionError(f"a call was refused without a time to come back: {answered!r}")
    return OverloadedCall(status, status == 200 and b"[DONE]" in rest and b'"error"' not in rest, head_s)
