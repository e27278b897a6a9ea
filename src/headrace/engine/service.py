"""The routes that answer with sampled tokens, whole or as a stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from headrace.engine import answers
from headrace.engine.chunks import ChatChunks
from headrace.engine.engine import Engine
from headrace.engine.failures import Refused, broken, not_offered
from headrace.engine.requests import (
    COMPLETION_TOKENS,
    AtroposRequest,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    StreamOptions,
    checked,
    prompts,
    room,
    within,
)
from headrace.engine.routing import body, json
from headrace.engine.sampling import Sampling
from headrace.engine.worker import Call, Delta

Chunk = dict[str, Any]


class Service:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def completions(self, request: Request) -> Response:
        asked = await body(request, CompletionRequest)
        self.engine.served(asked.model)
        asked.check()
        engine = self.engine
        limit = within(asked.max_tokens, engine.context)
        found: list[tuple[list[int], Sampling]] = []
        for prompt in prompts(asked.prompt):
            ids = engine.words.encode(prompt, special=asked.add_special_tokens) if isinstance(prompt, str) else prompt
            ids = checked(ids, engine.vocabulary, engine.context)
            most = room(limit, COMPLETION_TOKENS, len(ids), engine.context)
            found.append(
                (ids, self._sampling(asked.sampling(engine.defaults, max_tokens=most, logprobs=asked.logprobs)))
            )
        call = engine.start(_name("cmpl", asked.request_id, request), found, stream=bool(asked.stream))
        head = self._head(call, "text_completion")
        if asked.stream:
            offsets: dict[int, int] = {}

            def chunk(delta: Delta) -> Chunk | None:
                if delta.finish_reason == "abort" and not delta.last:
                    return None  # as vLLM: nothing is said of an answer that was aborted before its first token
                at = delta.sequence.index
                choice, offsets[at] = answers.completion_choice(asked, delta, engine.words, offsets.get(at, 0))
                return {**head, "choices": [choice]}

            return self._streamed(call, chunk, head, asked.stream_options)
        await self._answered(call, request)
        return json(answers.completion(head, asked, call.sequences, engine.words, engine.fingerprint))

    async def chat(self, request: Request) -> Response:
        asked = await body(request, ChatRequest)
        self.engine.served(asked.model)
        asked.check()
        engine = self.engine
        if asked.tools and asked.tool_choice not in (None, "auto", "none"):
            raise not_offered("a tool_choice other than auto or none", "tool_choice")
        ids = engine.rendered(asked)
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        limit = within(limit, engine.context)
        most = room(limit, engine.default_max_tokens, len(ids), engine.context)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        sampling = self._sampling(asked.sampling(engine.defaults, max_tokens=most, logprobs=logprobs))
        call = engine.start(_name("chatcmpl", asked.request_id, request), [(ids, sampling)], stream=bool(asked.stream))
        if asked.stream:
            head = self._head(call, "chat.completion.chunk")
            chunks = ChatChunks(head, asked, engine.words)
            return self._streamed(call, chunks, head, asked.stream_options, chunks.opening(call.sequences))
        await self._answered(call, request)
        head = self._head(call, "chat.completion")
        return json(answers.chat_completion(head, asked, call.sequences, engine.words, engine.fingerprint))

    async def generate(self, request: Request) -> Response:
        asked = await body(request, GenerateRequest)
        self.engine.served(asked.model)
        engine = self.engine
        ids = checked(asked.token_ids, engine.vocabulary, engine.context)
        given = asked.sampling_params
        most = room(given.max_tokens, engine.default_max_tokens, len(ids), engine.context)
        for name in ("features", "content_parts"):
            if (asked.model_extra or {}).get(name):
                raise not_offered("multi-modal input", name)
        sampling = self._sampling(given.sampling({}, max_tokens=most, logprobs=given.logprobs))
        call = engine.start(
            _name("generate-tokens", asked.request_id, request), [(ids, sampling)], stream=bool(asked.stream)
        )
        name, mode, told = call.request_id, asked.output_mode, bool(asked.return_token_ids)
        if asked.stream:
            head = {"request_id": name, "usage": None}
            rest = {"output_mode": mode, "choices": []}
            untold = [{"prompt_token_ids": ids}] if told else []  # until the first chunk

            def chunk(delta: Delta) -> Chunk:
                text = delta.text if mode == "text" else None
                end = delta.finish_reason is not None
                choice = answers.generate_choice(
                    delta.sequence, delta.first, delta.last, engine.words, end=end, text=text
                )
                return {**head, **(untold.pop() if untold else {}), **rest, "choices": [choice]}

            return self._streamed(call, chunk, {**head, **rest}, asked.stream_options)
        await self._answered(call, request)
        return json(answers.generated(name, engine.name, call.sequences, engine.words, ids=told, mode=mode))

    async def atropos_generate(self, request: Request) -> Response:
        """`/generate` as Atropos' `vllm_api_server.py` answers it: where its environments take tokens."""
        asked = await body(request, AtroposRequest)
        if asked.stream:
            raise Refused("/generate does not stream; /v1/completions does.", param="stream")
        engine, prompt = self.engine, asked.prompt
        ids = engine.words.encode(prompt, special=True) if isinstance(prompt, str) else prompt.prompt_token_ids
        ids = checked(ids, engine.vocabulary, engine.context)
        most = room(asked.max_tokens, None, len(ids), engine.context)
        sampling = self._sampling(asked.sampling({}, max_tokens=most, logprobs=asked.logprobs))
        call = engine.start(_name("generate", None, request), [(ids, sampling)], stream=False)
        await self._answered(call, request)
        text = prompt if isinstance(prompt, str) else engine.words.decode(ids)
        return json(answers.atropos_generated(text, call.sequences))

    # -- how a call is carried -----------------------------------------------------------------------------------------

    def _sampling(self, sampling: Sampling) -> Sampling:
        sampling.check(self.engine.vocabulary)
        return sampling

    def _head(self, call: Call, kind: str) -> Chunk:
        return {"id": call.request_id, "object": kind, "created": answers.now(), "model": self.engine.name}

    async def _answered(self, call: Call, request: Request) -> None:
        """Waits for the end of every choice; a client that hangs up ends them sooner."""
        gone = asyncio.ensure_future(_disconnected(request, call))
        try:
            await call.done
        finally:
            gone.cancel()
            self.engine.end(call)
        for sequence in call.sequences:
            if sequence.error is not None:
                raise broken(sequence.error)

    def _streamed(
        self,
        call: Call,
        chunk: Callable[[Delta], Chunk | None],
        head: Chunk,
        options: StreamOptions | None,
        opening: list[Chunk] | None = None,
    ) -> Response:
        sequences, n = call.sequences, call.sequences[0].sampling.n
        always = options is not None and bool(options.continuous_usage_stats)
        usage_last = options is not None and bool(options.include_usage)
        # OpenAI's streams are signed in their last chunk; those of ids alone are not.
        signed = {"system_fingerprint": self.engine.fingerprint} if "id" in head else {}

        async def events() -> AsyncIterator[bytes]:
            try:
                for found in opening or []:
                    yield _event(found)
                left = len(sequences)
                while left:
                    delta = await call.news.get()
                    left -= delta.finish_reason is not None
                    if delta.sequence.error is not None:
                        yield b"data: " + bytes(broken(delta.sequence.error).response().body) + b"\n\n"
                        break
                    told = chunk(delta)
                    if told is None:
                        continue
                    if delta.finish_reason is not None and not usage_last:
                        told |= signed
                    yield _event({**told, "usage": answers.usage(sequences, n)} if always else told)
                else:
                    if usage_last:
                        yield _event({**head, "choices": [], "usage": answers.usage(sequences, n), **signed})
                yield b"data: [DONE]\n\n"
            finally:
                self.engine.end(call)

        return StreamingResponse(events(), media_type="text/event-stream")


async def _disconnected(request: Request, call: Call) -> None:
    """Ends the wait for a call whose client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not call.done.done():
        call.done.set_exception(ClientDisconnect())


def _event(chunk: Chunk) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _name(kind: str, asked: str | None, request: Request) -> str:
    # Not uuid4: a system call a request would hand the interpreter to the other thread each time.
    return f"{kind}-{request.headers.get('x-request-id') or asked or f'{random.getrandbits(64):016x}'}"
