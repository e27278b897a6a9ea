"""The servers behind the live streams of `headrace bench gateway`: a rollout server that samples at a pace, and a proxy
that passes streams on as they come; each a process of its own.

    python -m headrace.bench.gateway.paced stub TOKENIZER_FOLDER TOKENS TOKENS_A_SECOND
    python -m headrace.bench.gateway.paced proxy UPSTREAM
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.bench.gateway.load import JSON
from headrace.bench.gateway.servers import BACKLOG, CONTEXT, MODEL, CannedAnswer, build_tokenizer, serve_proxy
from headrace.bench.server_process import ServerProcess
from headrace.net.stub_http import EVENT_STREAM, event_chunk, last_chunks, requests_of, whole_answer


def start_paced_stub(folder: Path, tokens: int, rate: float) -> ServerProcess:
    """Starts a rollout server whose every stream has so many tokens, so many a second; its tokenizer is in `folder`."""
    build_tokenizer(folder)
    return ServerProcess("headrace.bench.gateway.paced", "stub", folder, tokens, rate)


def start_streaming_proxy(stub: ServerProcess) -> ServerProcess:
    """Starts the bare proxy in front of it."""
    return ServerProcess("headrace.bench.gateway.paced", "proxy", stub.address)


class PacedStub:
    """Answers `/v1/completions` and `/v1/chat/completions` with the same stream: the first token at once, one at each
    tick after it, each a write of its own, as rollout servers write them. All streams share one clock."""

    def __init__(self, sampled: CannedAnswer, rate: float) -> None:
        self._count = len(sampled.ids)
        self._period_s = 1 / rate
        self._head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
        self._first = sampled.choice(0, 1)
        self._frames = [
            event_chunk({**self._head, "choices": [sampled.choice(at, at + 1)]}) for at in range(self._count)
        ]
        self._live: dict[asyncio.StreamWriter, tuple[int, int, asyncio.Event]] = {}

    async def run(self) -> None:
        """Serves on a port of the system's, which it prints, for ever."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=BACKLOG)
        print(f"stub ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self._period_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            for writer, (at, prompt, over) in list(self._live.items()):
                if at < self._count:
                    writer.write(self._frames[at])
                    self._live[writer] = (at + 1, prompt, over)
                else:
                    writer.write(self._ending(prompt))
                    del self._live[writer]
                    over.set()

    def _ending(self, prompt: int) -> bytes:
        count = self._count
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
        return last_chunks({**self._head, "choices": [], "usage": usage})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for path, body in requests_of(reader):
                await self._answer(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._live.pop(writer, None)
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            asked = orjson.loads(body)
            prompt = asked.get("prompt") or []
            if not asked.get("stream"):  # the gateway's probe
                writer.write(whole_answer(200, self._probed(prompt)))
                return
            over = asyncio.Event()
            first = {**self._head, "choices": [{**self._first, "prompt_token_ids": prompt}]}
            writer.write(EVENT_STREAM + event_chunk(first))
            self._live[writer] = (1, len(prompt), over)
            await over.wait()
        elif path == "/health":
            writer.write(whole_answer(200, {}))
        elif path == "/v1/models":
            model = {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
            writer.write(whole_answer(200, {"object": "list", "data": [model]}))
        else:
            writer.write(whole_answer(404, {"detail": "Not Found"}))

    def _probed(self, prompt: list[int]) -> dict[str, Any]:
        usage = {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + 1, "completion_tokens": 1}
        choice = {**self._first, "finish_reason": "length", "prompt_token_ids": prompt}
        return {**self._head, "choices": [choice], "usage": usage}


def create_streaming_proxy(upstream: str) -> Starlette:
    """The least that can stand between an agent and a rollout server that streams: bytes are passed on as they come."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            yield {"session": session}

    async def forward(request: Request) -> Response:
        session: aiohttp.ClientSession = request.state.session
        answer = await session.post(upstream + request.url.path, data=await request.body(), headers=JSON)

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.content.iter_any():
                yield piece
            answer.release()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])], lifespan=lifespan)


def _serve_stub(folder: str, tokens: str, rate: str) -> None:
    uvloop.run(PacedStub(CannedAnswer(Path(folder), int(tokens)), float(rate)).run())


def _serve_proxy(upstream: str) -> None:
    serve_proxy(create_streaming_proxy(upstream))


if __name__ == "__main__":
    if sys.argv[1] == "stub":
        _serve_stub(*sys.argv[2:])
    else:
        _serve_proxy(*sys.argv[2:])
