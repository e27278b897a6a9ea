"""The engine's application: routes that sample, whole or as a stream, and routes that describe what is served. The
trainer's routes are in `control`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.engine import answers
from headrace.engine.answers import ChatChunks
from headrace.engine.control import TrainerRoutes
from headrace.engine.cuda_ipc import gpu_id
from headrace.engine.engine import Engine
from headrace.engine.http import (
    EngineRequestError,
    Handler,
    internal_error,
    json_response,
    no_route,
    not_offered,
    read_body,
    with_refusals,
)
from headrace.engine.requests import (
    COMPLETION_TOKENS,
    AtroposRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    StreamOptions,
    TokenizeRequest,
    answer_limit,
    check_max_tokens,
    check_prompt,
    read_prompts,
)
from headrace.engine.sequence import SamplingParams
from headrace.engine.worker import EngineCall, SequenceDelta
from headrace.version import __version__

Chunk = dict[str, Any]


class SamplingRoutes:
    """The routes that sample."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`: text or ids in, text and ids out."""
        asked = await read_body(request, CompletionRequest)
        self.engine.served(asked.model)
        asked.check()
        engine = self.engine
        limit = check_max_tokens(asked.max_tokens, engine.context)
        found: list[tuple[list[int], SamplingParams]] = []
        for prompt in read_prompts(asked.prompt):
            ids = (
                engine.tokenizer.encode(prompt, special=asked.add_special_tokens) if isinstance(prompt, str) else prompt
            )
            ids = check_prompt(ids, engine.vocabulary, engine.context)
            most = answer_limit(limit, COMPLETION_TOKENS, len(ids), engine.context)
            found.append(
                (ids, self._sampling(asked.sampling(engine.defaults, max_tokens=most, logprobs=asked.logprobs)))
            )
        call = engine.start(_name("cmpl", asked.request_id, request), found, stream=bool(asked.stream))
        head = self._head(call, "text_completion")
        if asked.stream:
            offsets: dict[int, int] = {}

            def chunk(delta: SequenceDelta) -> Chunk | None:
                if delta.finish_reason == "abort" and not delta.last:
                    return None  # as vLLM: nothing is said of an answer that was aborted before its first token
                at = delta.sequence.index
                choice, offsets[at] = answers.completion_choice(asked, delta, engine.tokenizer, offsets.get(at, 0))
                return {**head, "choices": [choice]}

            return self._streamed(call, chunk, head, asked.stream_options)
        await self._answered(call, request)
        return json_response(answers.completion(head, asked, call.sequences, engine.tokenizer, engine.fingerprint))

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`: messages, rendered by the model's chat template."""
        asked = await read_body(request, ChatRequest)
        self.engine.served(asked.model)
        asked.check()
        engine = self.engine
        if asked.tools and asked.tool_choice not in (None, "auto", "none"):
            raise not_offered("a tool_choice other than auto or none", "tool_choice")
        ids = engine.rendered(asked)
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        limit = check_max_tokens(limit, engine.context)
        most = answer_limit(limit, engine.default_max_tokens, len(ids), engine.context)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        sampling = self._sampling(asked.sampling(engine.defaults, max_tokens=most, logprobs=logprobs))
        call = engine.start(_name("chatcmpl", asked.request_id, request), [(ids, sampling)], stream=bool(asked.stream))
        if asked.stream:
            head = self._head(call, "chat.completion.chunk")
            chunks = ChatChunks(head, asked, engine.tokenizer)
            return self._streamed(call, chunks, head, asked.stream_options, chunks.opening(call.sequences))
        await self._answered(call, request)
        head = self._head(call, "chat.completion")
        return json_response(answers.chat_completion(head, asked, call.sequences, engine.tokenizer, engine.fingerprint))

    async def generate(self, request: Request) -> Response:
        """`/inference/v1/generate`: token ids in, token ids out."""
        asked = await read_body(request, GenerateRequest)
        self.engine.served(asked.model)
        engine = self.engine
        ids = check_prompt(asked.token_ids, engine.vocabulary, engine.context)
        given = asked.sampling_params
        most = answer_limit(given.max_tokens, engine.default_max_tokens, len(ids), engine.context)
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

            def chunk(delta: SequenceDelta) -> Chunk:
                text = delta.text if mode == "text" else None
                end = delta.finish_reason is not None
                choice = answers.generate_choice(
                    delta.sequence, delta.first, delta.last, engine.tokenizer, end=end, text=text
                )
                return {**head, **(untold.pop() if untold else {}), **rest, "choices": [choice]}

            return self._streamed(call, chunk, {**head, **rest}, asked.stream_options)
        await self._answered(call, request)
        return json_response(
            answers.generated(name, engine.name, call.sequences, engine.tokenizer, ids=told, mode=mode)
        )

    async def atropos_generate(self, request: Request) -> Response:
        """`/generate` as Atropos' `vllm_api_server.py` answers it, from which its environments take tokens."""
        asked = await read_body(request, AtroposRequest)
        if asked.stream:
            raise EngineRequestError("/generate does not stream; /v1/completions does.", param="stream")
        engine, prompt = self.engine, asked.prompt
        ids = engine.tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt.prompt_token_ids
        ids = check_prompt(ids, engine.vocabulary, engine.context)
        most = answer_limit(asked.max_tokens, None, len(ids), engine.context)
        sampling = self._sampling(asked.sampling({}, max_tokens=most, logprobs=asked.logprobs))
        call = engine.start(_name("generate", None, request), [(ids, sampling)], stream=False)
        await self._answered(call, request)
        text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(ids)
        return json_response(answers.atropos_generated(text, call.sequences))

    # -- how a call is carried -----------------------------------------------------------------------------------------

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        sampling.check(self.engine.vocabulary)
        return sampling

    def _head(self, call: EngineCall, kind: str) -> Chunk:
        return {"id": call.request_id, "object": kind, "created": answers.now(), "model": self.engine.name}

    async def _answered(self, call: EngineCall, request: Request) -> None:
        """Waits until every choice has ended; aborts them where the client disconnects."""
        gone = asyncio.ensure_future(_disconnected(request, call))
        try:
            await call.done
        finally:
            gone.cancel()
            self.engine.end(call)
        for sequence in call.sequences:
            if sequence.error is not None:
                raise internal_error(sequence.error)

    def _streamed(
        self,
        call: EngineCall,
        chunk: Callable[[SequenceDelta], Chunk | None],
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
                        yield b"data: " + bytes(internal_error(delta.sequence.error).response().body) + b"\n\n"
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


async def _disconnected(request: Request, call: EngineCall) -> None:
    """Ends the wait for a call when its client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    if not call.done.done():
        call.done.set_exception(ClientDisconnect())


def _event(chunk: Chunk) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _name(kind: str, asked: str | None, request: Request) -> str:
    # Not uuid4: a system call a request would hand the interpreter to the other thread each time.
    return f"{kind}-{request.headers.get('x-request-id') or asked or f'{random.getrandbits(64):016x}'}"


#: The version of vLLM whose wire this is, and what really answers.
VLLM_VERSION = f"0.32.0+headrace.{__version__}"


class InfoRoutes:
    """Routes that describe what is served, and convert between text and ids."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._started = answers.now()

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: the ids of a text, or of messages by the chat template."""
        asked = await read_body(request, TokenizeRequest)
        self.engine.served(asked.model)
        tokenizer = self.engine.tokenizer
        if asked.messages is not None:
            ids = self.engine.rendered(asked)
        elif asked.prompt is not None:
            ids = tokenizer.encode(asked.prompt, special=asked.add_special_tokens is not False)
        else:
            raise EngineRequestError("Either prompt or messages must be given.", param="prompt")
        found = {"count": len(ids), "max_model_len": self.engine.context, "tokens": ids}
        return json_response({**found, "token_strs": tokenizer.pieces(ids) if asked.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`: the text of ids."""
        asked = await read_body(request, DetokenizeRequest)
        self.engine.served(asked.model)
        ids = check_prompt(asked.tokens, self.engine.vocabulary, len(asked.tokens) + 1) if asked.tokens else []
        return json_response({"prompt": self.engine.tokenizer.decode(ids)})

    async def models(self, request: Request) -> Response:
        """`/v1/models`: the served model, with its folder as `root`."""
        permission = {
            "id": f"modelperm-{random.getrandbits(64):016x}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self.engine.name,
            "object": "model",
            "created": self._started,
            "owned_by": "headrace",
            "root": str(self.engine.folder),
            "parent": None,
            "max_model_len": self.engine.context,
            "permission": [permission],
        }
        return json_response({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        """`/health`: 200 with an empty body; 503, as vLLM, where nothing can be sampled any more."""
        return Response(status_code=200 if self.engine.worker.alive else 503)

    async def version(self, request: Request) -> Response:
        """`/version`: the vLLM version that is emulated, with Headrace's as its local part."""
        return json_response({"version": VLLM_VERSION})

    async def server_info(self, request: Request) -> Response:
        """`/server_info`: the dtype that is computed in, where vLLM has it in its own, and on which GPU."""
        dtype, device = await self.engine.worker.ask(lambda scheduler: (scheduler.model.dtype, scheduler.model.device))
        config = {"model": str(self.engine.folder), "dtype": str(dtype), "max_model_len": self.engine.context}
        gpu = gpu_id(device)
        return json_response(
            {
                "vllm_config": {"model_config": config, "lora_config": None},
                "vllm_env": {},
                "gpu": None if gpu is None else asdict(gpu),
            }
        )

    async def load(self, request: Request) -> Response:
        """`/load`: the number of calls that are being answered."""
        return json_response({"server_load": len(self.engine.open)})

    async def memory(self, request: Request) -> Response:
        """Bytes that the engine holds, by what for."""
        return json_response(asdict(await self.engine.worker.ask(lambda scheduler: scheduler.memory())))


def create_app(engine: Engine) -> Starlette:
    """The application with every route. It does not close the engine: whoever made it does."""
    service, info, control = SamplingRoutes(engine), InfoRoutes(engine), TrainerRoutes(engine)
    posts: dict[str, Handler] = {
        "/v1/completions": service.completions,
        "/v1/chat/completions": service.chat,
        "/inference/v1/generate": service.generate,
        "/generate": service.atropos_generate,
        "/tokenize": info.tokenize,
        "/detokenize": info.detokenize,
        "/pause": control.pause,
        "/resume": control.resume,
        "/abort_requests": control.abort_requests,
        "/update_weight_version": control.update_weight_version,
        "/reset_prefix_cache": control.reset_prefix_cache,
        "/collective_rpc": control.collective_rpc,
        "/load_weights_shm": control.load_weights_shm,
        "/load_weights_cuda_ipc": control.load_weights_cuda_ipc,
        "/sum_cuda_ipc": control.sum_cuda_ipc,
        "/score_tokens": control.score_tokens,
    }
    gets: dict[str, Handler] = {
        "/v1/models": info.models,
        "/health": info.health,
        "/ping": info.health,
        "/version": info.version,
        "/server_info": info.server_info,
        "/load": info.load,
        "/memory": info.memory,
        "/is_paused": control.is_paused,
        "/weight_info": control.weight_info,
        "/debug/calls": control.debug_calls,
    }
    routes = [Route(path, with_refusals(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, with_refusals(handler), methods=["GET"]) for path, handler in gets.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: no_route})
