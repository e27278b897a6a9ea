"""The servers of `headrace bench gateway`: the rollout server that the gateway calls (a stub), the proxy that the
gateway is measured against, and the gateway; each a process of its own.

    python -m headrace.bench.gateway.servers stub TOKENIZER_FOLDER SAMPLED FIRST_TOKEN_MS
    python -m headrace.bench.gateway.servers proxy UPSTREAM
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.bench.gateway.load import JSON, KEEP_ALIVE_S, SOURCE, WORDS, GatewaySizes
from headrace.bench.server_process import ServerProcess
from headrace.engine.tiny import bpe_tokenizer
from headrace.net.server import Server

#: More merges than the words need: learning ends when every word is whole.
VOCABULARY = 4096
#: Numbers and letters of chat and JSON, so that they too are more than bytes.
OTHERS = ("system", "user", "assistant", "tool", "function", "name", "arguments", "description", "helpful")


def build_tokenizer(into: Path) -> None:
    """Writes a tokenizer that needs no network into a folder, which `--tokenizer-path` takes.

    It is byte-level BPE with the chat template of the engine's tiny model. The merges are learned on the spot from the
    text that agents speak, so a word is a token, as it is for the commonest words in a tokenizer of 150,000. The same
    text gives the same tokenizer.
    """
    from tokenizers import pre_tokenizers

    spoken = [" ".join([word, word]) for word in sorted({*WORDS, *OTHERS})]
    tokenizer = bpe_tokenizer([SOURCE, *spoken, *spoken], VOCABULARY, pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.save_pretrained(into)


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

#: Connections that may wait to be taken: a thousand streams begin within seconds.
BACKLOG = 4096
MODEL = "stub"
CONTEXT = 131_072


class CannedAnswer:
    """The stub's answer, whole and token by token."""

    def __init__(self, folder: Path, count: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ids: list[int] = tokenizer.encode(SOURCE * 8, add_special_tokens=False).ids[:count]
        self.pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in self.ids]
        self.text = "".join(self.pieces)
        self.log_probs = [-0.05 - 0.031 * (at * 7 % 23) for at in range(count)]

    def choice(self, begin: int, end: int) -> dict[str, Any]:
        """A choice of `/v1/completions` with the tokens in this range."""
        pieces, log_probs = self.pieces[begin:end], self.log_probs[begin:end]
        offsets = [len("".join(self.pieces[:at])) for at in range(begin, end)]
        return {
            "index": 0,
            "text": "".join(pieces),
            "logprobs": {
                "text_offset": offsets,
                "token_logprobs": log_probs,
                "tokens": pieces,
                "top_logprobs": [{piece: log_prob} for piece, log_prob in zip(pieces, log_probs, strict=True)],
            },
            "finish_reason": "length" if end == len(self.ids) else None,
            "stop_reason": None,
            "token_ids": self.ids[begin:end],
            "prompt_token_ids": None,
        }


class StubServer:
    """A rollout server, plain ASGI, that answers at once with the same sampled ids and log-probs, in vLLM's shape.

    What depends on the request is echoed (`prompt_token_ids`, the counts); the rest is encoded once, at start, so that
    it takes as little CPU as possible. It also answers chat bodies, for those who forward one.
    """

    def __init__(self, sampled: CannedAnswer, first_token_s: float) -> None:
        self._sampled = sampled
        self._first_token_s = first_token_s
        count = len(sampled.ids)
        self._whole = sampled.choice(0, count)
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
        self._head = head
        self._events = [_event({**head, "choices": [sampled.choice(at, at + 1)]}) for at in range(1, count)]
        self._chat_head = {**head, "id": "chatcmpl-1", "object": "chat.completion"}
        chunk = {**self._chat_head, "object": "chat.completion.chunk"}
        deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in sampled.pieces)]
        finish = [None] * count + ["length"]
        self._chat_events = [
            _event({**chunk, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]})
            for delta, reason in zip(deltas, finish, strict=True)
        ]
        self._models = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": CONTEXT}]}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        route = f"{scope['method']} {scope['path']}"
        raw = await _body(receive)
        if route == "GET /health":
            await _answer(send, 200, {})
        elif route == "GET /v1/models":
            await _answer(send, 200, self._models)
        elif route == "POST /v1/completions":
            await self._complete(orjson.loads(raw), send)
        elif route == "POST /v1/chat/completions":
            await self._chat(orjson.loads(raw), send)
        else:
            await _answer(send, 404, {"detail": "Not Found"})

    async def _complete(self, body: dict[str, Any], send: Send) -> None:
        if self._first_token_s:
            await asyncio.sleep(self._first_token_s)
        prompt: list[int] = body["prompt"]
        usage = self._usage(len(prompt))
        if not body.get("stream"):
            choice = {**self._whole, "prompt_token_ids": prompt}
            await _answer(send, 200, {**self._head, "choices": [choice], "usage": usage})
            return
        first = {**self._sampled.choice(0, 1), "prompt_token_ids": prompt}
        last = _event({**self._head, "choices": [], "usage": usage})
        await _stream(send, [_event({**self._head, "choices": [first]}), *self._events, last])

    async def _chat(self, body: dict[str, Any], send: Send) -> None:
        if self._first_token_s:
            await asyncio.sleep(self._first_token_s)
        if body.get("stream"):
            await _stream(send, self._chat_events)
            return
        message = {"role": "assistant", "content": self._sampled.text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        # A proxy's agents do not look at this count, and nothing here turns messages into ids.
        await _answer(send, 200, {**self._chat_head, "choices": [choice], "usage": self._usage(0)})

    def _usage(self, prompt: int) -> dict[str, int]:
        sampled = len(self._sampled.ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, body: Any) -> None:
    raw = orjson.dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _stream(send: Send, events: list[bytes]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


FORWARDED = ("/v1/chat/completions", "/v1/completions")


def create_proxy(upstream: str) -> Starlette:
    """The least that can stand between an agent and a rollout server: bodies are forwarded unread. It uses what the
    gateway uses: a raw Starlette route on uvicorn (uvloop, httptools), and aiohttp upstream."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield {"session": session}

    async def forward(request: Request) -> Response:
        session: aiohttp.ClientSession = request.state.session
        body = await request.body()
        async with session.post(upstream + request.url.path, data=body, headers=JSON) as answer:
            return Response(await answer.read(), answer.status, media_type=answer.content_type)

    async def health(request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    routes = [Route(path, forward, methods=["POST"]) for path in FORWARDED]
    return Starlette(routes=[*routes, Route("/health", health)], lifespan=lifespan)


def start_stub(folder: Path, sizes: GatewaySizes, *, first_token_ms: float = 0) -> ServerProcess:
    """Starts the stub server, with its tokenizer in `folder`."""
    build_tokenizer(folder)
    return ServerProcess("headrace.bench.gateway.servers", "stub", folder, sizes.sampled, first_token_ms)


def start_proxy(stub: ServerProcess) -> ServerProcess:
    """Starts the bare proxy in front of the stub."""
    return ServerProcess("headrace.bench.gateway.servers", "proxy", stub.address)


def start_gateway(stub: ServerProcess, folder: Path, *flags: object) -> ServerProcess:
    """Starts a gateway without waiting for it, so that several can start at once; `ready` waits."""
    return ServerProcess("headrace.gateway", *gateway_flags(stub, folder), *flags)


def gateway_flags(stub: ServerProcess, folder: Path) -> tuple[object, ...]:
    """The flags of a gateway before the stub. The renderer is named, so that `auto` need not try them all."""
    where = ("--vllm-addresses", stub.address, "--tokenizer-path", folder, "--renderer", "template")
    return (*where, "--host", "127.0.0.1", "--port", 0)


def ready(*gateways: ServerProcess) -> None:
    """Waits until each gateway is ready."""
    for gateway in gateways:
        gateway.wait_until("/ready")


def _serve_stub(folder: str, sampled: str, first_token_ms: str) -> None:
    stub = StubServer(CannedAnswer(Path(folder), int(sampled)), float(first_token_ms) / 1e3)
    Server(stub, "127.0.0.1", 0).run(lambda address: print(f"stub ready on {address}", flush=True))


def serve_proxy(proxy: Starlette) -> None:
    """Serves a proxy on a port of the system's, which it prints."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        print(f"proxy ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(proxy, log_level="warning", access_log=False)
        uvicorn.Server(config).run([listener])


def _serve_proxy(upstream: str) -> None:
    serve_proxy(create_proxy(upstream))


if __name__ == "__main__":
    if sys.argv[1] == "stub":
        _serve_stub(*sys.argv[2:])
    else:
        _serve_proxy(*sys.argv[2:])
