"""A rollout server that says what was recorded, over the part of vLLM's wire that a gateway uses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.replay.recorded import NotRecorded, RecordedAnswer, RecordedAnswers
from headrace.tokens import Vocabulary

#: What it is called, and the longest prompt that it takes: any that was recorded.
MODEL_NAME, MAX_MODEL_LEN = "recorded", 10_000_000
#: The log-probs of two tokens at temperature 1, with which a gateway finds out what kind of log-probs it is told.
PROBED = {"token_id:1": -0.5, "token_id:2": -2.5}


class ReplayedCall(msgspec.Struct):
    """What is read of a call; every sampling parameter is passed over, since nothing is sampled."""

    prompt: list[int] | str
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    temperature: float = 1.0
    return_tokens_as_token_ids: bool = False


class RecordedServer:
    """The application. An answer is that of `RecordedAnswers`; a prompt that was not recorded is 409."""

    def __init__(self, answers: RecordedAnswers, vocabulary: Vocabulary) -> None:
        self._answers, self._vocabulary = answers, vocabulary
        self.app = Starlette(
            routes=[
                Route("/health", self._well, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/pause", self._well, methods=["POST"]),
                Route("/resume", self._well, methods=["POST"]),
            ]
        )

    async def _well(self, request: Request) -> Response:
        return _json({})

    async def _models(self, request: Request) -> Response:
        return _json(
            {"object": "list", "data": [{"id": MODEL_NAME, "object": "model", "max_model_len": MAX_MODEL_LEN}]}
        )

    async def _tokenize(self, request: Request) -> Response:
        asked = orjson.loads(await request.body())
        return _json({"tokens": self._vocabulary.encode(asked["prompt"])})

    async def _completions(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=ReplayedCall)
        except msgspec.MsgspecError as error:
            return _fault(400, f"the call cannot be read: {error}")
        if isinstance(asked.prompt, str):
            return _fault(400, "the prompt is text; recorded calls are found by token ids")
        if asked.return_tokens_as_token_ids:
            return _json({"choices": [self._probed(asked)]})
        try:
            found = [self._answers.next(asked.prompt) for _ in range(max(1, asked.n))]
        except NotRecorded as error:
            return _fault(409, str(error))
        if asked.stream:
            return StreamingResponse(self._streamed(asked, found), media_type="text/event-stream")
        choices = [self._choice(asked.prompt, at, answer, asked.max_tokens) for at, answer in enumerate(found)]
        return _json({"id": "cmpl-recorded", "object": "text_completion", "choices": choices})

    async def _streamed(self, asked: ReplayedCall, found: list[RecordedAnswer]) -> AsyncIterator[bytes]:
        """Each answer in one event: how it was cut into events was not recorded."""
        assert not isinstance(asked.prompt, str)
        for at, answer in enumerate(found):
            yield _event({"choices": [self._choice(asked.prompt, at, answer, asked.max_tokens)]})
        yield _event({"choices": [], "usage": {}}) + b"data: [DONE]\n\n"

    def _probed(self, asked: ReplayedCall) -> dict[str, Any]:
        """One token with log-probs of what was sampled from, as recorded ones are."""
        top = {name: value / asked.temperature for name, value in PROBED.items()}
        told = {"token_logprobs": [-0.5], "tokens": ["token_id:1"], "top_logprobs": [top], "text_offset": []}
        about = {"token_ids": [1], "prompt_token_ids": asked.prompt, "stop_reason": None}
        return {"index": 0, "text": "", "logprobs": told, "finish_reason": "length", **about}

    def _choice(self, prompt: list[int], at: int, answer: RecordedAnswer, most: int | None) -> dict[str, Any]:
        cut = most is not None and most < len(answer.ids)
        ids = answer.ids[:most] if cut else answer.ids
        tokens = [self._vocabulary.decode([token]) for token in ids]
        log_probs = answer.log_probs[: len(ids)]
        tops = [{token: value} if value is not None else {} for token, value in zip(tokens, log_probs, strict=True)]
        return {
            "index": at,
            "text": self._text(prompt, ids, stopped=not cut and answer.finish_reason == "stop"),
            "logprobs": {"token_logprobs": log_probs, "tokens": tokens, "top_logprobs": tops, "text_offset": []},
            "finish_reason": "length" if cut else _finish(answer.finish_reason),
            "stop_reason": None if cut else answer.stop_reason,
            "token_ids": ids,
            "prompt_token_ids": prompt,
        }

    def _text(self, prompt: list[int], ids: list[int], *, stopped: bool) -> str:
        """What a server says of ids after a prompt: without a special token that ended the turn."""
        if stopped and ids and ids[-1] in self._vocabulary.added:
            ids = ids[:-1]
        return self._vocabulary.decode_after(prompt, ids)


def _finish(reason: str) -> str:
    """How a rollout server says it; what a gateway made of it (`tool_calls`) it does not know."""
    return "length" if reason == "length" else "stop"


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _fault(status: int, words: str) -> Response:
    return _json({"error": {"message": words, "type": "invalid_request_error", "param": None, "code": status}}, status)


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
