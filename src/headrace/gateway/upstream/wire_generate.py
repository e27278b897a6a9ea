"""`POST /inference/v1/generate`: tokens in, tokens out, with the versions that sampled them. It carries no text."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.gateway.upstream.types import Order, Sampled
from headrace.gateway.upstream.versions import Told, told_spans
from headrace.gateway.upstream.wire import NOT_TOLD, Asked, Fault, Said, TokenId, experts, no_ids, numbers

#: What means the same here as in a completion. Everything else (text that stops, grammars, alternatives by their text,
#: fields that nobody here knows) needs what only a completion does.
SAME = frozenset(
    {
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "allowed_token_ids",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    }
)


class _LogProb(msgspec.Struct):
    logprob: float | None = None


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Choice(msgspec.Struct):
    index: int
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None
    weight_versions: list[Told] | None = None
    routed_experts: str | None = None


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = NOT_TOLD


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    error: Fault | None = None


class Generate:
    """The wire of servers that tell versions."""

    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(_Whole)
        self._piece = msgspec.json.Decoder(_Piece)

    @staticmethod
    def can(order: Order) -> bool:
        """Whether this wire answers an order as a completion would."""
        if order.tops or order.extra:
            return False
        return all(
            name in SAME or value is None or value == [] or value == {} for name, value in order.sampling.items()
        )

    def body(self, asked: Asked, model: str, *, stream: bool) -> bytes:
        order = asked.order
        sampling = {name: value for name, value in order.sampling.items() if name in SAME and value is not None}
        given: dict[str, Any] = {
            "model": model,
            "token_ids": orjson.Fragment(asked.prompt),
            "sampling_params": {**sampling, "logprobs": 1, "skip_special_tokens": False},
            "return_token_ids": True,
        }
        if order.call_id:
            given["request_id"] = order.call_id
        if stream:
            given["stream"] = True
        return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY)

    def whole(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = self._whole.decode(asked.short(data))
        return _sampled(found.choices, asked, found.prompt_token_ids, version)

    def piece(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = self._piece.decode(asked.short(data))
        if found.error is not None:
            raise Said.of(found.error)
        return _sampled(found.choices, asked, found.prompt_token_ids, version)


def _sampled(choices: list[_Choice], asked: Asked, prompt: msgspec.Raw, version: int) -> list[Sampled]:
    consumed = asked.consumed(prompt)
    found = []
    for choice in choices:
        if choice.token_ids is None:
            raise no_ids()
        given = None if choice.logprobs is None else choice.logprobs.content
        found.append(
            Sampled(
                choice.index,
                choice.token_ids,
                None if given is None else numbers([entry.logprob for entry in given]),
                None,
                choice.finish_reason,
                choice.stop_reason,
                consumed,
                told_spans(choice.weight_versions, version),
                routed_experts=experts(choice.routed_experts),
            )
        )
    return found
