"""Live streams through the gateway: what a token costs it against a bare proxy, and how many streams it holds.

The rollout server samples each answer at a pace; agents read as it comes. What is measured of a token is the CPU of the
process between them, everything that a call costs included.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop

from headrace.bench.gateway.load import JSON, GatewaySizes, speech, words_from
from headrace.bench.gateway.paced import start_paced_stub, start_streaming_proxy
from headrace.bench.gateway.servers import ready, start_gateway
from headrace.bench.report import Figures
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import median
from headrace.net.server import allow_files

#: The channel whose streams are written every 250 ms.
ROLLOUTS = "rollouts"
FLUSH_MS = f"50,{ROLLOUTS}:250"
PROMPT_WORDS = 60
#: A socket is a file, and there are thousands.
MANY_FILES = 1 << 16
#: A stream counts as held where its first token comes within so many seconds of the rollout server's own, and it takes
#: no longer than so many times its pace.
FIRST_TOKEN_S, STRETCH = 0.1, 1.05


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One stream: whether it ended as it should, and seconds to its first token and to its end."""

    whole: bool
    first_s: float
    total_s: float


def live_streams(sizes: GatewaySizes, folder: Path) -> Figures:
    """`stream_us_token`, `stream_vs_proxy` and `stream250_vs_proxy`: a sampled token's CPU at flushes of 50 and 250 ms;
    `streams_held`: how many live streams one process holds at 250 ms."""
    allow_files(MANY_FILES)
    cpu: dict[str, list[float]] = {"proxy": [], "gateway": [], "gateway250": []}
    with (
        start_paced_stub(folder, sizes.live_tokens, sizes.live_rate) as stub,
        start_gateway(stub, folder, "--stream-flush-ms", FLUSH_MS) as gateway,
        start_streaming_proxy(stub) as proxy,
    ):
        ready(gateway)
        sides = {
            "proxy": partial(_cpu_us_token, sizes, proxy, None),
            "gateway": partial(_cpu_us_token, sizes, gateway, "train"),
            "gateway250": partial(_cpu_us_token, sizes, gateway, ROLLOUTS),
        }
        for at in range(sizes.live_rounds + 1):
            for name, side in sides.items():
                found = side()
                if at:  # the first round warms up
                    cpu[name].append(found)
    with (
        start_paced_stub(folder, sizes.held_tokens, sizes.live_rate) as stub,
        start_gateway(stub, folder, "--stream-flush-ms", FLUSH_MS) as gateway,
    ):
        ready(gateway)
        held = (sizes.held_streams, sizes.held_tokens, sizes.live_rate)
        direct, _ = _round(stub, None, *held)
        through, held_cpu = _round(gateway, ROLLOUTS, *held)
    pace_s = sizes.held_tokens / sizes.live_rate
    base_s = p99([stream.first_s for stream in direct])
    kept = [
        stream
        for stream in through
        if stream.whole and stream.first_s <= base_s + FIRST_TOKEN_S and stream.total_s <= STRETCH * pace_s
    ]
    proxy_us, us, us250 = (median(cpu[name]) for name in ("proxy", "gateway", "gateway250"))
    return Figures(
        {
            "stream_us_token": us,
            "stream_vs_proxy": us / proxy_us,
            "stream250_vs_proxy": us250 / proxy_us,
            "streams_held": float(len(kept)),
        },
        {
            "stream_us_token_250": us250,
            "stream_us_token_proxy": proxy_us,
            "streams_unbroken": float(sum(stream.whole for stream in through)),
            "streams_first_token_ms_p99": p99([stream.first_s for stream in through]) * 1e3,
            "streams_first_token_ms_p99_direct": base_s * 1e3,
            "streams_stretch_max": max(stream.total_s for stream in through) / pace_s,
            "streams_us_token_held": held_cpu / (sizes.held_streams * sizes.held_tokens) * 1e6,
        },
    )


def _cpu_us_token(sizes: GatewaySizes, server: ServerProcess, channel: str | None) -> float:
    """Microseconds of a process's CPU for each token of many streams at once; raises where one broke."""
    found, used = _round(server, channel, sizes.live_streams, sizes.live_tokens, sizes.live_rate)
    if not all(stream.whole for stream in found):
        raise AssertionError(f"{sum(not stream.whole for stream in found)} of {len(found)} streams broke")
    return used / (sizes.live_streams * sizes.live_tokens) * 1e6


def _round(
    server: ServerProcess, channel: str | None, streams: int, tokens: int, rate: float
) -> tuple[list[StreamTimes], float]:
    """So many streams, begun one after the other while the first goes on, so that all are live at once, and the
    server's CPU seconds for them. With a channel each has a trajectory of its own there, begun before that counts."""
    paths = ["/v1/chat/completions"] * streams
    if channel is not None:
        paths = uvloop.run(begin_trajectories(server.address, channel, streams))
    before = server.cpu_s()
    found = uvloop.run(_streams(server.address, paths, tokens, tokens / rate * 0.9 / streams))
    return found, server.cpu_s() - before


async def begin_trajectories(address: str, channel: str, count: int) -> list[str]:
    """The paths of so many new trajectories' chat calls."""
    async with aiohttp.ClientSession() as session:
        return [await _begin(session, address, channel) for _ in range(count)]


async def _streams(address: str, paths: list[str], tokens: int, apart_s: float) -> list[StreamTimes]:
    said = speech()
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def agent(number: int) -> StreamTimes:
        await asyncio.sleep(begin + number * apart_s - loop.time())
        return await _stream(address, paths[number], tokens, words_from(said, number, PROMPT_WORDS))

    return list(await asyncio.gather(*map(agent, range(len(paths)))))


async def _begin(session: aiohttp.ClientSession, address: str, channel: str) -> str:
    asked = orjson.dumps({"channel": channel})
    async with session.post(address + "/init_trajectory", data=asked, headers=JSON) as answer:
        answer.raise_for_status()
        base: str = orjson.loads(await answer.read())["base_url"]
    return urlsplit(base).path + "/v1/chat/completions"


async def _stream(address: str, path: str, tokens: int, text: str) -> StreamTimes:
    loop, url = asyncio.get_running_loop(), urlsplit(address)
    asked = {"model": "any", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
    body = orjson.dumps(asked)
    head = f"POST {path} HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    begun = loop.time()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
    first_s, tail = 0.0, b""
    while data := await reader.read(1 << 16):
        if not first_s and b"data: {" in data:
            first_s = loop.time() - begun
        tail = (tail + data)[-300:]
        if tail.endswith(b"\r\n0\r\n\r\n"):
            break  # the stub keeps its connection
    total_s = loop.time() - begun
    writer.close()
    return StreamTimes(b"[DONE]" in tail and b'"error"' not in tail, first_s or total_s, total_s)


def p99(values: list[float]) -> float:
    """The value that one in a hundred is above."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]
