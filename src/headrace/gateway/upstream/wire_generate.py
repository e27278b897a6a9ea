"""`POST /inference/v1/generate`: tokens in, tokens out, with the versions that sampled them. It carries no text."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.data.errors import shown
from headrace.data.step import IntArray
from headrace.gateway.upstream.types import Order, Sampled
from headrace.gateway.upstream.versions import Told, told_spans
from headrace.gateway.upstream.wire import NOT_TOLD, Asked, Fault, Nonsense, Said, TokenId, experts, no_ids, numbers

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


class _Run(msgspec.Struct):
    """Where an image stands, as the server tells it."""

    offset: int
    length: int


Runs = dict[str, list[_Run]] | None


class _Whole(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    mm_placeholders: Runs = None


class _Piece(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = NOT_TOLD
    mm_placeholders: Runs = None
    error: Fault | None = None


class Generate:
    """The wire of servers that tell versions."""

    def __init__(self) -> None:
        self._whole = msgspec.json.Decoder(_Whole)
        self._piece = msgspec.json.Decoder(_Piece)

    @staticmethod
    def can(order: Order) -> bool:
        """Whether this wire answers an order as a completion would."""
        return not Generate.missing(order)

    @staticmethod
    def missing(order: Order) -> list[str]:
        """What an order asks for that this wire does not have."""
        given = {name for name, value in order.sampling.items() if value is not None and value != [] and value != {}}
        return [*(["logprobs"] if order.tops else []), *sorted(order.extra), *sorted(given - SAME)]

    def body(self, asked: Asked, model: str, *, stream: bool) -> bytes:
        order = asked.order
        sampling = {name: value for name, value in order.sampling.items() if name in SAME and value is not None}
        given: dict[str, Any] = {
            "model": model,
            "token_ids": orjson.Fragment(asked.sent()),
            "sampling_params": {**sampling, "logprobs": 1, "skip_special_tokens": False},
            "return_token_ids": True,
        }
        if order.images:
            given["content_parts"] = [{"type": "image_url", "url": placed.image.url} for placed in order.images]
        if order.call_id:
            given["request_id"] = order.call_id
        if stream:
            given["stream"] = True
        return orjson.dumps(given, option=orjson.OPT_SERIALIZE_NUMPY)

    def whole(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = self._whole.decode(asked.short(data))
        return _sampled(found.choices, asked, _told(asked, found.prompt_token_ids, found.mm_placeholders), version)

    def piece(self, asked: Asked, data: bytes, version: int) -> list[Sampled]:
        found = self._piece.decode(asked.short(data))
        if found.error is not None:
            raise Said.of(found.error)
        return _sampled(found.choices, asked, _told(asked, found.prompt_token_ids, found.mm_placeholders), version)


def _told(asked: Asked, prompt: msgspec.Raw, runs: Runs) -> IntArray | None:
    """The prompt as the server told it. Where images are in it, it must be the one that was planned: a server may well
    answer without having looked at one."""
    consumed, images = asked.consumed(prompt), asked.order.images
    if not images or consumed is None:
        return consumed
    stand = [(run.offset, run.length) for run in (runs or {}).get("image", ())]
    planned = [(placed.offset, placed.length) for placed in images]
    if consumed is not asked.order.prompt or stand != planned:
        raise Nonsense(
            f"it did not read the prompt's images as its model's processor does here: they stand at {shown(stand)} in "
            f"{len(consumed)} ids, and belong at {shown(planned)} in {len(asked.order.prompt)} (offset, length)"
        )
    return consumed


def _sampled(choices: list[_Choice], asked: Asked, consumed: IntArray | None, version: int) -> list[Sampled]:
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
