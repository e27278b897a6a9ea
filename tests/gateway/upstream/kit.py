"""Rollout servers to talk to: real engines, and one of our own that can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from tests.gateway.wire import Writer, begin_stream, event, respond, send

from headrace.gateway.upstream import SampledChoice, Upstream, UpstreamOptions, UpstreamRequest
from headrace.tokens.vocabulary import Vocabulary

Json = dict[str, Any]
Behaviour = Callable[["Request", Writer], Awaitable[None]]

#: Patient enough for a busy machine; tests that wait for one of them to run out set it themselves.
OPTIONS: Json = {
    "connect_s": 60.0,
    "idle_s": 240.0,
    "call_s": 280.0,
    "probe_s": 0.05,
    "verify_s": 120.0,
    "abort_grace_s": 0.1,
}

PROMPT = [5, 6, 7]


class Request:
    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers = method, path, headers
        self.json: Any = json.loads(body) if body else None


def upstream_request(prompt: list[int] | None = None, **fields: Any) -> UpstreamRequest:
    known = {name: fields.pop(name) for name in ("extra", "top_logprobs", "sticky", "call_id") if name in fields}
    sampling = {"max_tokens": 8, "temperature": 1.0, **fields}
    return UpstreamRequest(np.array(prompt or PROMPT, np.int32), sampling, **known)


@asynccontextmanager
async def connected(vocabulary: Vocabulary, *servers: Any, **options: Any) -> AsyncIterator[Upstream]:
    """An upstream that has probed these servers."""
    upstream = Upstream([getattr(s, "address", s) for s in servers], UpstreamOptions(**{**OPTIONS, **options}))
    await upstream.start(vocabulary)
    try:
        yield upstream
    finally:
        await upstream.close()


async def pieces(upstream: Upstream, asked: UpstreamRequest) -> list[Any]:
    return [piece async for piece in streamed(upstream, asked)]


async def streamed(
    upstream: Upstream, asked: UpstreamRequest, flush_s: float = 0.0
) -> AsyncGenerator[SampledChoice, None]:
    """The pieces of an answer; closing it cancels the call."""
    told: asyncio.Queue[SampledChoice | None] = asyncio.Queue()
    streaming = asyncio.create_task(upstream.stream(asked, told.put_nowait, flush_s))
    streaming.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (piece := await told.get()) is not None:
            yield piece
        await streaming
    finally:
        streaming.cancel()
        await asyncio.wait([streaming])


async def until(held: Callable[[], bool]) -> None:
    """Lets everything else run until something holds; the test's own time limit bounds it."""
    while not held():
        await asyncio.sleep(0.001)


# -- a server that does as it is told ----------------------------------------------------------------------------------


class Puppet:
    """Speaks enough of vLLM's wire to be found fit. `behave` says what it does with a completion instead of answering.

    It samples the ids 10, 11, 12, ... with log-probs -0.5.
    """

    def __init__(self, **answers: Any) -> None:
        self.address = ""
        #: By path: a status and a body in place of what it would answer.
        self.answers: dict[str, tuple[int, Any]] = {path: answer for path, answer in answers.items()}
        self.behave: Behaviour | None = None
        #: The same for every request.
        self.behave_always: Behaviour | None = None
        self.seen: list[Request] = []
        #: Connections that the other side closed while it was behaving.
        self.hung_up = asyncio.Event()
        #: Connections that were ever opened.
        self.opened = 0
        self._connections: set[Writer] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> Puppet:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        """Dies: nothing listens any more, and every connection breaks."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._connections):
            writer.transport.abort()
        await until(lambda: not self._connections)

    @property
    def orders(self) -> list[Json]:
        """What it was asked to sample, probes left out."""
        return [r.json for r in self.seen if r.path == "/v1/completions" and "return_tokens_as_token_ids" not in r.json]

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._connections.add(writer)
        self.opened += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                request = Request(method, path, headers, body)
                self.seen.append(request)
                behave = self.behave_always or (self.behave if request.json in self.orders else None)
                if behave is not None:
                    behaving = asyncio.ensure_future(behave(request, writer))
                    gone = asyncio.ensure_future(reader.read(1))
                    await asyncio.wait([behaving, gone], return_when=asyncio.FIRST_COMPLETED)
                    if not behaving.done():
                        self.hung_up.set()
                    behaving.cancel()
                    gone.cancel()
                    return
                status, answer = self.answers.get(path.partition("?")[0]) or self._answer(request)
                await respond(writer, status, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answer(self, request: Request) -> tuple[int, Any]:
        match request.path.partition("?")[0]:
            case "/health" | "/pause" | "/resume":
                return 200, {}
            case "/v1/models":
                return 200, {"data": [{"id": "puppet", "max_model_len": 4096}]}
            case "/v1/completions" if request.json.get("stream"):
                return 200, [b"".join(stream_of(request.json))]
            case "/v1/completions":
                return 200, completion(request.json)
        return 404, {"error": {"message": "no such route", "param": None, "code": 404}}


def completion(asked: Json) -> Json:
    return {"choices": [_choice(asked, index, 0, asked["max_tokens"]) for index in range(asked.get("n", 1))]}


def stream_of(asked: Json) -> list[bytes]:
    """The events of an answer, token by token, and the end."""
    found = []
    for at in range(asked["max_tokens"]):
        choice = _choice(asked, 0, at, at + 1)
        choice["finish_reason"] = "length" if at + 1 == asked["max_tokens"] else None
        choice["prompt_token_ids"] = None if at else choice["prompt_token_ids"]
        found.append(event({"choices": [choice]}))
    return [*found, event({"choices": [], "usage": {}}), b"data: [DONE]\n\n"]


def _choice(asked: Json, index: int, first: int, last: int) -> Json:
    ids = list(range(10 + first, 10 + last))
    return {
        "index": index,
        "text": "x" * len(ids),
        "logprobs": {
            "token_logprobs": [-0.5] * len(ids),
            "tokens": ["x"] * len(ids),
            "top_logprobs": [{"x": -0.5}] * len(ids),
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": asked["prompt"],
    }


# -- behaviours --------------------------------------------------------------------------------------------------------


def answers(status: int, answer: Any, *headers: str) -> Behaviour:
    async def behave(request: Request, writer: Writer) -> None:
        await respond(writer, status, answer, *headers)

    return behave


async def drips_events(request: Request, writer: Writer) -> None:
    """A stream of keep-alives that never has a token."""
    await begin_stream(writer)
    while True:
        await send(writer, b": still there\n\n")
        await asyncio.sleep(0.01)


def streams(count: int, then: Behaviour, seen: asyncio.Event | None = None) -> Behaviour:
    """So many events of an answer, then, once they were seen, something else."""

    async def behave(request: Request, writer: Writer) -> None:
        await begin_stream(writer)
        for part in stream_of(request.json)[:count]:
            await send(writer, part)
        if seen is not None:
            await seen.wait()
        await then(request, writer)

    return behave


def says(part: bytes) -> Behaviour:
    async def behave(request: Request, writer: Writer) -> None:
        await send(writer, part)
        await asyncio.Event().wait()

    return behave
