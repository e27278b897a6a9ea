"""A rollout server that answers at once: always the same sampled ids and log-probs, in the shape of vLLM's answers.

All that depends on the request is echoed (`prompt_token_ids`, the counts); the rest is written once, when it starts, so
that it takes as little of the machine as it can. It answers a chat body too, for those who pass one through.

python -m headrace.bench.gateway.stub TOKENIZER_FOLDER SAMPLED FIRST_TOKEN_MS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from headrace.bench.gateway.text import SOURCE
from headrace.net.server import Server

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MODEL = "stub"
CONTEXT = 131_072


class Sampled:
    """The answer, the whole of it and token by token."""

    def __init__(self, folder: Path, count: int) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.ids: list[int] = tokenizer.encode(SOURCE * 8, add_special_tokens=False).ids[:count]
        self.pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in self.ids]
        self.text = "".join(self.pieces)
        self.log_probs = [-0.05 - 0.031 * (at * 7 % 23) for at in range(count)]

    def choice(self, begin: int, end: int) -> dict[str, Any]:
        """A choice of `/v1/completions` with these of the tokens."""
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


class Stub:
    """The application: plain ASGI."""

    def __init__(self, sampled: Sampled, first_token_s: float) -> None:
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


if __name__ == "__main__":
    folder, sampled, first_token_ms = sys.argv[1:]
    stub = Stub(Sampled(Path(folder), int(sampled)), float(first_token_ms) / 1e3)
    Server(stub, "127.0.0.1", 0).run(lambda address: print(f"stub ready on {address}", flush=True))
