"""The agents of `headrace bench gateway`: how much they do, what they say, how they write it down, and the
conversations themselves, over HTTP, one after the other or many at once.

An agent that gets anything but what it should is an error: a figure of a run in which calls failed means nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

import aiohttp
import orjson
import uvloop

from headrace.bench.timing import median

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class GatewaySizes:
    """The sizes of a conversation belong to the meaning of the figures; rounds only make medians steadier.

    A word is a token, and a turn adds about ten more of the chat format's.
    """

    name: str
    turns: int = 4
    first_words: int = 490
    more_words: int = 24
    sampled: int = 128

    many_callers: int = 64
    some_callers: int = 16
    trajectories_a_caller: int = 2
    throughput_rounds: int = 15

    many_turns: int = 20
    chat_rounds: int = 9

    lone_trajectories: int = 10
    lone_rounds: int = 15

    short_words: int = 590
    long_history: int = 32_000
    long_turn_words: int = 500
    history_calls: int = 4
    history_rounds: int = 9

    ray_rounds: int = 15

    first_token_ms: float = 20
    streams: int = 5
    stream_rounds: int = 9

    live_streams: int = 100
    live_tokens: int = 100
    live_rate: float = 30.0
    live_rounds: int = 3
    held_streams: int = 1000
    held_tokens: int = 300

    worker_rounds: int = 9

    overload_calls: int = 200
    overload_idle: int = 2000
    overload_slow: int = 50
    overload_tokens: int = 150

    page_trajectories_a_caller: int = 16
    page_views: int = 12
    page_rounds: int = 9


FULL = GatewaySizes("full")
QUICK = GatewaySizes(
    "quick",
    throughput_rounds=5,
    chat_rounds=4,
    lone_rounds=5,
    history_rounds=5,
    ray_rounds=5,
    stream_rounds=5,
    live_rounds=2,
    worker_rounds=3,
    page_rounds=5,
)


SOURCE = """\
A mill needs two things from the river: enough water, and water that comes when the wheel can use it. So the people who
built the first mills did not put their wheel into the stream itself. They dug a channel beside it, closed it with a
small gate, and let in only as much as they wanted. When the river was high they sent the rest over a weir, and when it
was low they kept what came during the night in a pond above the house. The wheel went round at its own speed, and the
stones ground the corn at theirs. Each part of the work had a place where it could wait for the other, and nobody had to
run from one end of the valley to the other to ask whether the next load was ready. If you look at the plan of such a
place you can read how it was used: where carts stood in line, where sacks were counted and marked, who opened the gate
in the morning and which door they closed behind them before dark. First find out how many people bring grain each day.
Then take that number, think about the largest cart, and leave room for one more. Let me check this step by step: what
arrives must be stored or ground, what is ground must be taken away, and nothing should be left on the floor. That is
the answer, as far as I know; write it down, count again tomorrow, and change only what did not work.
"""
#: Each of them a token.
WORDS = [word.strip(".,:;") for word in SOURCE.split()]
#: Agents speak from here, each from a place of its own, so that hardly two prompts are alike.
SPEECH_WORDS = 1 << 16


def speech(seed: int = 0) -> list[str]:
    """A long run of words in no order."""
    return random.Random(seed).choices(WORDS, k=SPEECH_WORDS)


def words_from(speech: list[str], at: int, count: int) -> str:
    """So many words of a speech, from a place that depends on `at`."""
    begin = at * 7919 % (len(speech) - count)
    return " ".join(speech[begin : begin + count])


Json = dict[str, Any]

SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """An answer: what the history keeps of it, its text, and how many tokens its prompt had."""

    kept: list[Json]
    text: str
    prompt_tokens: int


class AgentDialect(Protocol):
    """One dialect: its route, its request for a history, and its answer."""

    path: str

    def request(self, history: list[Json], most: int) -> Json: ...

    def heard(self, answer: Json) -> AgentAnswer: ...


class ChatAgentDialect:
    path = "/chat/completions"

    def request(self, history: list[Json], most: int) -> Json:
        messages = [{"role": "system", "content": SYSTEM}, *history]
        return {"model": "default", "messages": messages, "temperature": 1.0, "max_tokens": most}

    def heard(self, answer: Json) -> AgentAnswer:
        text = answer["choices"][0]["message"]["content"]
        return AgentAnswer([{"role": "assistant", "content": text}], text, answer["usage"]["prompt_tokens"])


class ResponsesAgentDialect:
    path = "/responses"

    def request(self, history: list[Json], most: int) -> Json:
        asked = {"model": "default", "instructions": SYSTEM, "input": history}
        return {**asked, "temperature": 1.0, "max_output_tokens": most}

    def heard(self, answer: Json) -> AgentAnswer:
        text = answer["output"][0]["content"][0]["text"]
        return AgentAnswer(answer["output"], text, answer["usage"]["input_tokens"])


class MessagesAgentDialect:
    path = "/messages"

    def request(self, history: list[Json], most: int) -> Json:
        return {"model": "default", "system": SYSTEM, "messages": history, "temperature": 1.0, "max_tokens": most}

    def heard(self, answer: Json) -> AgentAnswer:
        kept = {"role": "assistant", "content": answer["content"]}
        return AgentAnswer([kept], answer["content"][0]["text"], answer["usage"]["input_tokens"])


JSON = {"content-type": "application/json"}
#: uvicorn closes a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Where agents call, and how: a gateway, which has trajectories, or a server that has none."""

    url: str
    trajectories: bool = True
    wire: AgentDialect = field(default_factory=ChatAgentDialect)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """What a round found: seconds of each call to the model, and of all of them together; and how much a meter rose
    meanwhile, where one was given."""

    latencies: list[float]
    took: float
    metered: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.took

    @property
    def p50(self) -> float:
        return median(self.latencies)


class GatewayLoad:
    """A loop and its connections, from which agents call. Every agent says something else."""

    def __init__(self, sizes: GatewaySizes) -> None:
        self.sizes = sizes
        self.speech = speech()
        self.numbers = itertools.count()

    def __enter__(self) -> GatewayLoad:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.session = self.run(_open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.run(self.session.close())
        self._runner.close()

    def run(self, doing: Coroutine[Any, Any, R]) -> R:
        return self._runner.run(doing)

    def round(
        self, target: LoadTarget, callers: int, trajectories: int, meter: Callable[[], float] = lambda: 0.0
    ) -> RoundTimes:
        """So many trajectories, spread over so many callers at once. `meter` is read when all are connected and when
        all have ended: connecting asks for /health, for which workers ask each other."""
        return self.run(self._round(target, callers, trajectories, meter))

    async def _round(
        self, target: LoadTarget, callers: int, trajectories: int, meter: Callable[[], float]
    ) -> RoundTimes:
        latencies: list[float] = []
        waiting = iter(range(trajectories))

        async def caller() -> None:
            for _ in waiting:
                agent = BenchAgent(self, target)
                await agent.begin()
                for turn in range(self.sizes.turns):
                    words = self.sizes.more_words if turn else self.sizes.first_words
                    latencies.append(await agent.ask(words))
                await agent.end()

        await asyncio.gather(*[self._connect(target) for _ in range(callers)])
        before = meter()
        start = time.perf_counter()
        await asyncio.gather(*[caller() for _ in range(callers)])
        return RoundTimes(latencies, time.perf_counter() - start, meter() - before)

    async def _connect(self, target: LoadTarget) -> None:
        """Opens a connection and leaves it for a caller to use."""
        async with self.session.get(target.url + "/health") as answer:
            await answer.read()


class BenchAgent:
    """One conversation."""

    def __init__(self, load: GatewayLoad, target: LoadTarget) -> None:
        self.prompt_tokens = 0  # of the last call, as the server counted them
        self._load = load
        self._target = target
        self._base = target.url + "/v1"
        self._number = next(load.numbers)
        self._history: list[dict[str, Any]] = []
        self._calls = 0

    async def begin(self) -> None:
        """Opens a trajectory where the target has any."""
        if self._target.trajectories:
            asked = {"channel": "train", "metadata": {"source": "bench"}}
            made = await self._post(self._target.url + "/init_trajectory", asked)
            self._base = made["base_url"] + "/v1"

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
        """Completes the trajectory; raises where it has not one step for each call."""
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
