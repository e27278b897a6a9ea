"""The dialects that are checked: clients of OpenAI's chat and completions, and the table of all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from headrace.checkup.answer import (
    STREAM_END,
    TOOL_DESCRIPTION,
    TOOL_NAME,
    TOOL_PARAMETERS,
    AnswerToolCall,
    CheckAnswer,
    CheckRequest,
    DialectClient,
    JoinedStream,
    Json,
    Malformed,
    parse_arguments,
)
from headrace.checkup.item_dialects import MessagesClient, ResponsesClient


def sampling_fields(ask: CheckRequest, model: str) -> Json:
    """The fields of a request that chat and completions share."""
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
    """An answer's choices by index; raises `Malformed` where it has none."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("the answer has no list of choices")
    return sorted(choices, key=lambda choice: int(choice.get("index", 0)))


def read_accounting(answer: CheckAnswer, body: Json, choice: Json) -> None:
    """Fills in what both dialects send besides text: how the answer ended, ids and usage."""
    answer.finish = choice.get("finish_reason")
    answer.told_ids = choice.get("token_ids")
    answer.told_prompt_ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    usage = body.get("usage") or {}
    answer.consumed = usage.get("prompt_tokens")
    if len(body["choices"]) == 1:
        answer.sampled = usage.get("completion_tokens")


def log_prob_values(log_probs: list[float | None]) -> list[float]:
    """Log-probs as floats; null as NaN."""
    return [math.nan if value is None else float(value) for value in log_probs]


def join_chunks(
    events: list[bytes], add: Callable[[Json, Json, JoinedStream], None], blank: Callable[[], Json]
) -> JoinedStream:
    """Joins the chunks of a stream into one body; `add` merges a chunk's choice into one that began as `blank`. Raises
    `Malformed` where the stream holds an error."""
    found = JoinedStream({"choices": []})
    if not events or events[-1] != STREAM_END:
        found.trouble("no_end", "the stream does not end with [DONE]")
    grown: dict[int, Json] = {}
    for data in events:
        if data == STREAM_END:
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


class ChatClient(DialectClient):
    """OpenAI's chat completions."""

    name = "chat"
    path = "/v1/chat/completions"
    turns = log_probs = several = True

    def result(self, call: AnswerToolCall, text: str) -> list[Json]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text}]

    def body(self, ask: CheckRequest, model: str) -> Json:
        found = {**sampling_fields(ask, model), "messages": ask.history}
        if ask.tops is not None:
            found |= {"logprobs": True, "top_logprobs": ask.tops}
        if ask.tool:
            function = {"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "parameters": TOOL_PARAMETERS}
            found["tools"] = [{"type": "function", "function": function}]
        return found

    def read(self, body: Json) -> list[CheckAnswer]:
        return [_chat_answer(body, choice) for choice in choices_of(body)]

    def join(self, events: list[bytes]) -> JoinedStream:
        return join_chunks(
            events, _add_chat_delta, lambda: {"message": {"role": "assistant", "content": ""}, "logprobs": None}
        )


def _chat_answer(body: Json, choice: Json) -> CheckAnswer:
    message = choice["message"]
    calls = message.get("tool_calls") or []
    answer = CheckAnswer(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        calls=[
            AnswerToolCall(call["id"], call["function"]["name"], parse_arguments(call["function"]["arguments"]))
            for call in calls
        ],
    )
    # What an agent keeps of a message: its SDK's object, less the fields that are null.
    kept = ("content", "reasoning_content", "tool_calls")
    item = {"role": "assistant", **{name: message[name] for name in kept if message.get(name)}}
    answer.items = [{"content": None if calls else "", **item}]
    read_accounting(answer, body, choice)
    entries = (choice.get("logprobs") or {}).get("content")
    if entries is not None:
        answer.tokens = [entry["token"] for entry in entries]
        answer.log_probs = log_prob_values([entry["logprob"] for entry in entries])
        answer.tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries]
    return answer


def _add_chat_delta(kept: Json, choice: Json, found: JoinedStream) -> None:
    message, delta = kept["message"], choice.get("delta") or {}
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    calls = message.setdefault("tool_calls", []) if delta.get("tool_calls") else []
    for part in delta.get("tool_calls") or ():
        if part["index"] == len(calls):
            calls.append({"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}})
        elif part["index"] > len(calls):
            found.trouble("call_order", f"a delta of tool call {part['index']} comes before its beginning")
            continue
        function = part.get("function") or {}
        for name in ("name", "arguments"):
            calls[part["index"]]["function"][name] += function.get(name) or ""
    told = (choice.get("logprobs") or {}).get("content")
    if told:
        kept["logprobs"] = {"content": [*((kept["logprobs"] or {}).get("content") or []), *told]}


class CompletionsClient(DialectClient):
    """OpenAI's completions. A history is one text, so there are no turns to continue."""

    name = "completions"
    path = "/v1/completions"
    turns = False
    log_probs = several = True

    def question(self, text: str) -> list[Json]:
        return [{"prompt": text}]

    def result(self, call: AnswerToolCall, text: str) -> list[Json]:
        raise Malformed("completions know no tools")

    def body(self, ask: CheckRequest, model: str) -> Json:
        found = {**sampling_fields(ask, model), "prompt": ask.history[0]["prompt"]}
        return found if ask.tops is None else {**found, "logprobs": ask.tops}

    def read(self, body: Json) -> list[CheckAnswer]:
        return [_completion_answer(body, choice) for choice in choices_of(body)]

    def join(self, events: list[bytes]) -> JoinedStream:
        return join_chunks(events, _add_completion_delta, lambda: {"text": "", "logprobs": None})


def _completion_answer(body: Json, choice: Json) -> CheckAnswer:
    answer = CheckAnswer(text=choice.get("text") or "")
    read_accounting(answer, body, choice)
    told = choice.get("logprobs")
    if told is not None:
        answer.tokens, answer.log_probs = told["tokens"], log_prob_values(told["token_logprobs"])
        answer.tops = [list((top or {}).items()) for top in told.get("top_logprobs") or ()]
    return answer


def _add_completion_delta(kept: Json, choice: Json, found: JoinedStream) -> None:
    kept["text"] += choice.get("text") or ""
    told = choice.get("logprobs")
    if told:
        had = kept["logprobs"] or {}
        kept["logprobs"] = {
            name: [*(had.get(name) or []), *(told.get(name) or [])]
            for name in ("tokens", "token_logprobs", "top_logprobs")
        }


DIALECTS: dict[str, DialectClient] = {
    each.name: each for each in (ChatClient(), CompletionsClient(), ResponsesClient(), MessagesClient())
}
