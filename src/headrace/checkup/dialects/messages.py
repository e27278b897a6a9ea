"""Anthropic's Messages."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.checkup.answer import PARAMETERS, TOOL, TOOL_SAYS, Answer, Ask, Call, Json, Malformed, Stream
from headrace.checkup.dialects.chat import arguments
from headrace.checkup.http import DONE

#: How an answer ended, in chat's words.
FINISH = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
#: Of each delta, the field of the block that it fills.
FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class Messages:
    name = "messages"
    path = "/v1/messages"
    turns = True
    log_probs = several = False

    def question(self, text: str) -> list[Json]:
        return [{"role": "user", "content": text}]

    def result(self, call: Call, text: str) -> list[Json]:
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": text}]}]

    def body(self, ask: Ask, model: str) -> Json:
        found: Json = {"model": model, "messages": ask.history, "max_tokens": ask.max_tokens}
        found["temperature"] = ask.temperature
        if ask.stop is not None:
            found["stop_sequences"] = [ask.stop]
        if ask.stream:
            found["stream"] = True
        if ask.tool:
            found["tools"] = [{"name": TOOL, "description": TOOL_SAYS, "input_schema": PARAMETERS}]
        return found

    def read(self, body: Json) -> list[Answer]:
        if not isinstance(body.get("content"), list):
            raise Malformed("the message has no list of content blocks")
        reason = body.get("stop_reason")
        # A turn without a block cannot be sent back: agents send a text of nothing.
        blocks = body["content"] or [{"type": "text", "text": ""}]
        answer = Answer(items=[{"role": "assistant", "content": blocks}], finish=FINISH.get(str(reason), reason))
        for block in body["content"]:
            match block["type"]:
                case "text":
                    answer.text += block["text"]
                case "thinking":
                    answer.reasoning += block["thinking"]
                case "tool_use":
                    answer.calls.append(Call(block["id"], block["name"], block["input"]))
        usage = body.get("usage") or {}
        cached = usage.get("cache_creation_input_tokens") or 0, usage.get("cache_read_input_tokens") or 0
        answer.consumed = None if usage.get("input_tokens") is None else usage["input_tokens"] + sum(cached)
        answer.sampled = usage.get("output_tokens")
        return [answer]

    def join(self, events: list[bytes]) -> Stream:
        found = Stream({"content": []})
        left = [event for data in events if data != DONE and (event := orjson.loads(data))["type"] != "ping"]
        order = [event["type"] for event in left]
        if order[:1] != ["message_start"] or order[-2:] != ["message_delta", "message_stop"]:
            found.trouble(
                "event_order",
                f"events are {', '.join(dict.fromkeys(order))}; message_start must be the first, "
                "message_delta and message_stop the last",
            )
        if not left or left[0]["type"] != "message_start":
            raise Malformed("the stream does not begin with message_start")
        found.body = {**left[0]["message"], "content": []}
        is_open = False
        for event in left[1:]:
            is_open = _add(found, event, is_open=is_open)
        return found


def _add(found: Stream, event: Any, *, is_open: bool) -> bool:
    """Takes an event in; whether a block is open behind it."""
    blocks = found.body["content"]
    match event["type"]:
        case "content_block_start":
            if is_open or event["index"] != len(blocks):
                found.trouble("event_order", f"block {event['index']} begins where block {len(blocks)} was due")
            blocks.append({**event["content_block"]})
            return True
        case "content_block_delta":
            if not is_open or event["index"] != len(blocks) - 1:
                found.trouble("event_order", f"a delta of block {event['index']}, which is not open")
                return is_open
            delta, block = event["delta"], blocks[-1]
            if delta["type"] == "input_json_delta":
                block["_written"] = block.get("_written", "") + delta["partial_json"]
            elif delta["type"] in FIELDS:
                name = FIELDS[delta["type"]]
                block[name] = block.get(name, "") + delta[name]
        case "content_block_stop":
            written = blocks[-1].pop("_written", None) if blocks else None
            if written:
                blocks[-1]["input"] = arguments(written)
            return False
        case "message_delta":
            found.body |= event["delta"]
            found.body["usage"] = {**(found.body.get("usage") or {}), **(event.get("usage") or {})}
    return is_open
