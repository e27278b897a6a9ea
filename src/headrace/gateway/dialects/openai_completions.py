"""OpenAI's completions: a prompt of text or ids in, text out. Several prompts are several turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.data.errors import shown
from headrace.data.step import IntArray
from headrace.gateway.dialects import openai
from headrace.gateway.errors import Refusal
from headrace.gateway.request import BadField, CallRequest, read_fields, take, take_max_tokens, take_n, take_sampling
from headrace.gateway.turn import Choice, Turn, usage
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta

#: OpenAI's own default, which agents that name none rely on.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256


class OpenAICompletions(openai.OpenAIDialect):
    """`POST /v1/completions`."""

    def read(self, body: bytes) -> CallRequest:
        fields = read_fields(body)
        openai.refuse_unbuilt(fields)
        model = take(fields, "model", str, "default", "a string")
        prompts = _prompts(fields.pop("prompt", None))
        stream, include_usage = openai.take_stream(fields)
        sampling = take_sampling(fields)
        sampling["max_tokens"] = take_max_tokens(fields, "max_tokens") or DEFAULT_MAX_TOKENS
        openai.take_format(fields, sampling)
        top_logprobs = take(fields, "logprobs", int, None, "an integer")
        if top_logprobs is not None and not 0 <= top_logprobs <= openai.MAX_TOP_LOGPROBS:
            raise BadField(f"logprobs is {top_logprobs}; it must lie in 0..{openai.MAX_TOP_LOGPROBS}", "logprobs")
        return CallRequest(
            model=model,
            prompts=prompts,
            sampling=sampling,
            n=take_n(fields),
            stream=stream,
            include_usage=include_usage,
            top_logprobs=top_logprobs,
            return_token_ids=take(fields, "return_token_ids", bool, False, "true or false"),
            user=openai.user_of(fields),
            extra=fields,
        )

    def whole(self, turns: list[Turn]) -> Any:
        choices = [_choice(turn, choice, choice.parsed.content) for turn in turns for choice in turn.choices]
        for turn, row in zip((t for t in turns for _ in t.choices), choices, strict=True):
            if turn.request.return_token_ids:
                row["prompt_token_ids"] = turn.plan.ids.tolist()
        return {**_head(turns[0]), "choices": choices, "usage": usage(turns)}

    def events(self, turns: list[Turn]) -> CompletionEvents:
        return CompletionEvents(turns)


class CompletionEvents:
    """Writes chunks with pieces of the choices' texts."""

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns

    def opening(self) -> bytes:
        return b""

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        shown = (
            piece is not None
            and bool(piece.ids)
            and (turn.request.top_logprobs is not None or turn.request.return_token_ids)
        )
        if not (delta.content or shown):
            return b""
        row: dict[str, Any] = {
            "index": turn.first + choice.index,
            "text": delta.content,
            "logprobs": None,
            "finish_reason": None,
        }
        if piece is not None:
            since = len(choice.ids) - len(piece.ids)
            if turn.request.top_logprobs is not None:
                row["logprobs"] = _log_probs(choice, since, turn.request.top_logprobs)
            if turn.request.return_token_ids:
                row["prompt_token_ids"] = turn.plan.ids.tolist() if not since else None
                row["token_ids"] = piece.ids
        return openai.event({**_head(turn), "choices": [row]})

    def closing(self) -> bytes:
        turns = self._turns
        events = []
        for turn in turns:
            for choice in turn.choices:
                row = {"index": turn.first + choice.index, "text": "", "logprobs": None}
                row["finish_reason"] = choice.finish_reason
                events.append(openai.event({**_head(turn), "choices": [row]}))
        if turns[0].request.include_usage:
            events.append(openai.event({**_head(turns[0]), "choices": [], "usage": usage(turns)}))
        return b"".join(events) + openai.DONE

    def error(self, refusal: Refusal) -> bytes:
        return openai.error_event(refusal)


def _head(turn: Turn) -> dict[str, Any]:
    return {
        "id": f"cmpl-{turn.call_id}",
        "object": "text_completion",
        "created": turn.created,
        "model": turn.request.model,
    }


def _choice(turn: Turn, choice: Choice, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": turn.first + choice.index,
        "text": text,
        "logprobs": None if turn.request.top_logprobs is None else _log_probs(choice, 0, turn.request.top_logprobs),
        "finish_reason": choice.finish_reason,
    }
    if turn.request.return_token_ids:
        found["token_ids"] = choice.ids
    return found


def _log_probs(choice: Choice, since: int, top_logprobs: int) -> dict[str, Any]:
    entries = openai.token_entries(choice, since, top_logprobs)
    offsets, at = [], sum(map(len, choice.tokens[:since]))
    for entry in entries:
        offsets.append(at)
        at += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": offsets,
    }


def _prompts(given: Any) -> tuple[str | IntArray, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given:
        if all(type(item) is int for item in given):
            return (_ids(given),)
        if len(given) > MAX_PROMPTS:
            raise BadField(f"prompt holds {len(given)} prompts; at most {MAX_PROMPTS} are taken in one call", "prompt")
        if all(isinstance(item, str) for item in given):
            return tuple(given)
        if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in given):
            return tuple(_ids(item) for item in given)
    raise BadField(
        f"prompt must be a text, a list of token ids, or a list of either, and not empty; not {shown(given)}", "prompt"
    )


def _ids(given: list[int]) -> IntArray:
    if min(given) < 0 or max(given) >= 2**31:
        raise BadField("prompt holds an id that is no token id (0 and above)", "prompt")
    return np.asarray(given, np.int32)
