"""What OpenAI's chat and completions share: sampling fields, chunks, and which ids and log-probs come with a choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from headrace.checkup.answer import Answer, Ask, Json, Malformed, Stream
from headrace.checkup.http import DONE


def sampling(ask: Ask, model: str) -> Json:
    found: Json = {"model": model, "max_tokens": ask.max_tokens, "temperature": ask.temperature, "top_p": 1.0}
    if ask.n > 1:
        found["n"] = ask.n
    if ask.seed is not None:
        found["seed"] = ask.seed
    if ask.stop is not None:
        found["stop"] = [ask.stop]
    if ask.ids:
        found["return_token_ids"] = True
    if ask.stream:
        found |= {"stream": True, "stream_options": {"include_usage": True}}
    return found


def choices_of(body: Json) -> list[Json]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("the answer has no list of choices")
    return sorted(choices, key=lambda choice: int(choice.get("index", 0)))


def account(answer: Answer, body: Json, choice: Json) -> None:
    """What both dialects tell beside an answer's words."""
    answer.finish = choice.get("finish_reason")
    answer.told_ids = choice.get("token_ids")
    answer.told_prompt_ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    usage = body.get("usage") or {}
    answer.consumed = usage.get("prompt_tokens")
    if len(body["choices"]) == 1:
        answer.sampled = usage.get("completion_tokens")


def values(log_probs: list[float | None]) -> list[float]:
    """Null is no log-prob, and stays none."""
    return [math.nan if value is None else float(value) for value in log_probs]


def join(events: list[bytes], add: Callable[[Json, Json, Stream], None], blank: Callable[[], Json]) -> Stream:
    """Chunks as one body; `add` puts a chunk's choice into the choice that grows."""
    found = Stream({"choices": []})
    if not events or events[-1] != DONE:
        found.trouble("no_end", "the stream does not end with [DONE]")
    grown: dict[int, Json] = {}
    for data in events:
        if data == DONE:
            continue
        chunk: Any = orjson.loads(data)
        if chunk.get("error"):
            raise Malformed(f"the stream holds an error: {chunk['error']}")
        for name in ("usage", "prompt_token_ids"):
            if chunk.get(name):
                found.body[name] = chunk[name]
        for choice in chunk.get("choices") or ():
            index = int(choice.get("index", 0))
            kept = grown.setdefault(index, {"index": index, "finish_reason": None, **blank()})
            if kept["finish_reason"] is not None and (choice.get("delta") or choice.get("text")):
                found.trouble("after_end", "more of an answer comes after its finish_reason")
            add(kept, choice, found)
            for name in ("token_ids", "prompt_token_ids"):
                if choice.get(name):
                    kept[name] = (kept.get(name) or []) + choice[name]
            if choice.get("finish_reason") is not None:
                if kept["finish_reason"] is not None:
                    found.trouble("ended_twice", "an answer has two finish_reasons")
                kept["finish_reason"] = choice["finish_reason"]
    for kept in grown.values():
        if kept["finish_reason"] is None:
            found.trouble("no_finish", "the stream ends without a finish_reason")
    found.body["choices"] = list(grown.values())
    return found
