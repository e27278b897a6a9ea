"""The agents: black-box conversations over HTTP, one after the other or many at once.

An agent that gets anything but what it should is an error: a figure of a run in which calls failed means nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import orjson
import uvloop

from headrace.bench.gateway.sizes import Sizes
from headrace.bench.gateway.text import speech, words_from
from headrace.bench.gateway.wire import Chat, Wire
from headrace.bench.timing import median

R = TypeVar("R")
JSON = {"content-type": "application/json"}
#: uvicorn closes a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where agents call, and how: a gateway, which has trajectories, or a server that has none."""

    url: str
    trajectories: bool = True
    wire: Wire = field(default_factory=Chat)


@dataclass(frozen=True, slots=True)
class Found:
    """What a round found: seconds of each call to the model, and of all of them together."""

    latencies: list[float]
    took: float

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.took

    @property
    def p50(self) -> float:
        return median(self.latencies)


class Load:
    """A loop and its connections, from which agents call. Every agent says something else."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.speech = speech()
        self.numbers = itertools.count()

    def __enter__(self) -> Load:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.session = self.run(_open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.run(self.session.close())
        self._runner.close()

    def run(self, doing: Coroutine[Any, Any, R]) -> R:
        return self._runner.run(doing)

    def round(self, target: Target, callers: int, trajectories: int) -> Found:
        """So many trajectories, spread over so many callers at once."""
        return self.run(self._round(target, callers, trajectories))

    async def _round(self, target: Target, callers: int, trajectories: int) -> Found:
        latencies: list[float] = []
        waiting = iter(range(trajectories))

        async def caller() -> None:
            for _ in waiting:
                agent = Agent(self, target)
                await agent.begin()
                for turn in range(self.sizes.turns):
                    words = self.sizes.more_words if turn else self.sizes.first_words
                    latencies.append(await agent.ask(words))
                await agent.end()

        await asyncio.gather(*[self._connect(target) for _ in range(callers)])
        start = time.perf_counter()
        await asyncio.gather(*[caller() for _ in range(callers)])
        return Found(latencies, time.perf_counter() - start)

    async def _connect(self, target: Target) -> None:
        """Opens a connection and leaves it for a caller to use."""
        async with self.session.get(target.url + "/health") as answer:
            await answer.read()


class Agent:
    """One conversation."""

    def __init__(self, load: Load, target: Target) -> None:
        self.prompt_tokens = 0  # of the last call, as the server counted them
        self._load = load
        self._target = target
        self._base = target.url + "/v1"
        self._number = next(load.numbers)
        self._history: list[dict[str, Any]] = []
        self._calls = 0

    async def begin(self) -> None:
        if self._target.trajectories:
            made = await self._post(self._target.url + "/init_trajectory", {})
            self._base = made["base_url"] + "/v1"
            await self._post(self._base + "/register_trajectory", {"channel": "train", "metadata": {"source": "bench"}})

    async def ask(self, words: int) -> float:
        """One call, with the whole history and so many new words; seconds until its answer was read."""
        body = self._next(words)
        start = time.perf_counter()
        answer = await self._post(self._base + self._target.wire.path, body)
        took = time.perf_counter() - start
        heard = self._target.wire.heard(answer)
        self.prompt_tokens = heard.prompt_tokens
        self._keep(heard.kept, heard.text)
        return took

    async def ask_streamed(self, words: int) -> float:
        """The same in chat completions, streamed; seconds until the first text."""
        body = orjson.dumps({**self._next(words), "stream": True})
        took, text = 0.0, ""
        start = time.perf_counter()
        async with self._load.session.post(self._base + "/chat/completions", data=body, headers=JSON) as answer:
            await _fine(answer)
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in orjson.loads(line[6:])["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and not text:
                        took = time.perf_counter() - start
                    text += piece
        self._keep([{"role": "assistant", "content": text}], text)
        return took

    async def end(self) -> None:
        if self._target.trajectories:
            done = await self._post(self._base + "/complete_trajectory", {"reward": 1.0})
            if done["steps"] != self._calls:
                raise AssertionError(f"{self._calls} calls were answered and {done['steps']} steps recorded")

    def _next(self, words: int) -> dict[str, Any]:
        self._calls += 1
        text = words_from(self._load.speech, self._number * 31 + self._calls, words)
        self._history.append({"role": "user", "content": text})
        return self._target.wire.request(self._history, self._load.sizes.sampled)

    def _keep(self, kept: list[dict[str, Any]], text: str) -> None:
        if not text:
            raise AssertionError(f"call {self._calls} to {self._base} was answered with no text")
        self._history += kept

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        async with self._load.session.post(url, data=orjson.dumps(body), headers=JSON) as answer:
            await _fine(answer)
            return orjson.loads(await answer.read())


async def _open() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))


async def _fine(answer: aiohttp.ClientResponse) -> None:
    if answer.status != 200:
        raise RuntimeError(f"{answer.method} {answer.url} was answered {answer.status}: {(await answer.text())[:500]}")
