"""OpenAI's chat completions."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.checkup.answer import PARAMETERS, TOOL, TOOL_SAYS, Answer, Ask, Call, Json, Stream
from headrace.checkup.dialects import openai


class Chat:
    name = "chat"
    path = "/v1/chat/completions"
    turns = log_probs = several = True

    def question(self, text: str) -> list[Json]:
        return [{"role": "user", "content": text}]

    def result(self, call: Call, text: str) -> list[Json]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text}]

    def body(self, ask: Ask, model: str) -> Json:
        found = {**openai.sampling(ask, model), "messages": ask.history}
        if ask.tops is not None:
            found |= {"logprobs": True, "top_logprobs": ask.tops}
        if ask.tool:
            function = {"name": TOOL, "description": TOOL_SAYS, "parameters": PARAMETERS}
            found["tools"] = [{"type": "function", "function": function}]
        return found

    def read(self, body: Json) -> list[Answer]:
        return [_answer(body, choice) for choice in openai.choices_of(body)]

    def join(self, events: list[bytes]) -> Stream:
        return openai.join(events, _add, lambda: {"message": {"role": "assistant", "content": ""}, "logprobs": None})


def _answer(body: Json, choice: Json) -> Answer:
    message = choice["message"]
    calls = message.get("tool_calls") or []
    answer = Answer(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        calls=[Call(call["id"], call["function"]["name"], arguments(call["function"]["arguments"])) for call in calls],
    )
    # What an agent keeps of a message: its SDK's object, less the fields that are null.
    kept = ("content", "reasoning_content", "tool_calls")
    item = {"role": "assistant", **{name: message[name] for name in kept if message.get(name)}}
    answer.items = [{"content": None if calls else "", **item}]
    openai.account(answer, body, choice)
    entries = (choice.get("logprobs") or {}).get("content")
    if entries is not None:
        answer.tokens = [entry["token"] for entry in entries]
        answer.log_probs = openai.values([entry["logprob"] for entry in entries])
        answer.tops = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries]
    return answer


def arguments(text: Any) -> Any:
    """What a call's arguments say; as they are where they are no JSON."""
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def _add(kept: Json, choice: Json, found: Stream) -> None:
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
