"""`POST /v1/completions` with ids in and ids out."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.gateway.upstream.types import Sampled
from headrace.gateway.upstream.wire import NOT_TOLD, Asked, Fault, Said, TokenId, experts, no_ids, numbers


class _LogProbs(msgspec.Struct):
    token_logprobs: list[float | None]


class _ShownLogProbs(_LogProbs):
    """With what an agent sees of them."""

    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    routed_experts: str | None = None


class _ShownChoice(_Choice):
    logprobs: _ShownLogProbs | None = None


class _Whole(msgspec.Struct):
    choices: list[_Choice]


class _ShownWhole(msgspec.Struct):
    choices: list[_ShownChoice]


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    error: Fault | None = None


class _ShownPiece(msgspec.Struct):
    choices: list[_ShownChoice] = []
    error: Fault | None = None


class Completions:
    """The wire that every server has."""

    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(_Whole)
        self._shown_whole = msgspec.json.Decoder(_ShownWhole)
        self._piece = msgspec.json.Decoder(_Piece)
        self._shown_piece = msgspec.json.Decoder(_ShownPiece)

    def body(self, asked: Asked, model: str, *, stream: bool) -> bytes:
        order = asked.order
        given: dict[str, Any] = {
            **order.extra,
            **{name: value for name, value in order.sampling.items() if value is not None},
            "model": model,
            "prompt": orjson.Fragment(asked.prompt),
            "logprobs": order.tops or 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        if order.call_id:
            given["request_id"] = order.call_id
        if stream:
            given["stream"] = True
            given["stream_options"] = {"include_usage": True}
        return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    def whole(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = (self._shown_whole if asked.order.tops else self._whole).decode(asked.short(data))
        return [_sampled(choice, asked) for choice in found.choices]

    def piece(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = (self._shown_piece if asked.order.tops else self._piece).decode(asked.short(data))
        if found.error is not None:
            raise Said.of(found.error)
        return [_sampled(choice, asked) for choice in found.choices]


def _sampled(choice: _Choice, asked: Asked) -> Sampled:
    if choice.token_ids is None:
        raise no_ids()
    given = choice.logprobs
    found = Sampled(
        choice.index,
        choice.token_ids,
        None if given is None else numbers(given.token_logprobs),
        choice.text,
        choice.finish_reason,
        choice.stop_reason,
        asked.consumed(choice.prompt_token_ids),
        routed_experts=experts(choice.routed_experts),
    )
    if isinstance(given, _ShownLogProbs):
        found.tokens = given.tokens
        found.top = None if given.top_logprobs is None else [shown or {} for shown in given.top_logprobs]
    return found
