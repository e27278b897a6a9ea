"""Clients of the dialects whose answers are typed items: Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

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

#: How an answer ended, in chat's words.
FINISH_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
#: Of each delta, the field of the block that it fills.
DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class MessagesClient(DialectClient):
    """Anthropic's Messages."""

    name = "messages"
    path = "/v1/messages"
    turns = True
    log_probs = several = False

    def result(self, call: AnswerToolCall, text: str) -> list[Json]:
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": text}]}]

    def body(self, ask: CheckRequest, model: str) -> Json:
        found: Json = {"model": model, "messages": ask.history, "max_tokens": ask.max_tokens}
        found["temperature"] = ask.temperature
        if ask.stop is not None:
            found["stop_sequences"] = [ask.stop]
        if ask.stream:
            found["stream"] = True
        if ask.tool:
            found["tools"] = [{"name": TOOL_NAME, "description": TOOL_DESCRIPTION, "input_schema": TOOL_PARAMETERS}]
        return found

    def read(self, body: Json) -> list[CheckAnswer]:
        if not isinstance(body.get("content"), list):
            raise Malformed("the message has no list of content blocks")
        reason = body.get("stop_reason")
        # A turn without a block cannot be sent back: agents send a text of nothing.
        blocks = body["content"] or [{"type": "text", "text": ""}]
        answer = CheckAnswer(
            items=[{"role": "assistant", "content": blocks}], finish=FINISH_REASONS.get(str(reason), reason)
        )
        for block in body["content"]:
            match block["type"]:
                case "text":
                    answer.text += block["text"]
                case "thinking":
                    answer.reasoning += block["thinking"]
                case "tool_use":
                    answer.calls.append(AnswerToolCall(block["id"], block["name"], block["input"]))
        usage = body.get("usage") or {}
        cached = usage.get("cache_creation_input_tokens") or 0, usage.get("cache_read_input_tokens") or 0
        answer.consumed = None if usage.get("input_tokens") is None else usage["input_tokens"] + sum(cached)
        answer.sampled = usage.get("output_tokens")
        return [answer]

    def join(self, events: list[bytes]) -> JoinedStream:
        found = JoinedStream({"content": []})
        left = [event for data in events if data != STREAM_END and (event := orjson.loads(data))["type"] != "ping"]
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
            is_open = _add_message_event(found, event, is_open=is_open)
        return found


def _add_message_event(found: JoinedStream, event: Any, *, is_open: bool) -> bool:
    """Adds an event; returns whether a block is open after it."""
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
            elif delta["type"] in DELTA_FIELDS:
                name = DELTA_FIELDS[delta["type"]]
                block[name] = block.get(name, "") + delta[name]
        case "content_block_stop":
            written = blocks[-1].pop("_written", None) if blocks else None
            if written:
                blocks[-1]["input"] = parse_arguments(written)
            return False
        case "message_delta":
            found.body |= event["delta"]
            found.body["usage"] = {**(found.body.get("usage") or {}), **(event.get("usage") or {})}
    return is_open


END_EVENTS = ("response.completed", "response.incomplete", "response.failed")
#: The events that fill an item, and the fields in which their `done` and the item itself hold the whole.
GROWING_EVENTS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
}


class ResponsesClient(DialectClient):
    """OpenAI's Responses."""

    name = "responses"
    path = "/v1/responses"
    turns = True
    log_probs = several = False

    def result(self, call: AnswerToolCall, text: str) -> list[Json]:
        return [{"type": "function_call_output", "call_id": call.id, "output": text}]

    def body(self, ask: CheckRequest, model: str) -> Json:
        found: Json = {"model": model, "input": ask.history, "max_output_tokens": ask.max_tokens}
        found |= {"temperature": ask.temperature, "top_p": 1.0, "store": False}
        if ask.ids:
            found["return_token_ids"] = True
        if ask.stream:
            found["stream"] = True
        if ask.tool:
            tool = {
                "type": "function",
                "name": TOOL_NAME,
                "description": TOOL_DESCRIPTION,
                "parameters": TOOL_PARAMETERS,
            }
            found["tools"] = [tool]
        return found

    def read(self, body: Json) -> list[CheckAnswer]:
        if not isinstance(body.get("output"), list):
            raise Malformed("the response has no list of output")
        answer = CheckAnswer(items=body["output"], finish="length" if body.get("status") == "incomplete" else "stop")
        for item in body["output"]:
            match item["type"]:
                case "message":
                    answer.text += "".join(part["text"] for part in item["content"] if part["type"] == "output_text")
                case "reasoning":
                    answer.reasoning += "".join(part["text"] for part in item.get("content") or ())
                case "function_call":
                    answer.calls.append(
                        AnswerToolCall(item["call_id"], item["name"], parse_arguments(item["arguments"]))
                    )
        answer.told_ids, answer.told_prompt_ids = body.get("token_ids"), body.get("prompt_token_ids")
        usage = body.get("usage") or {}
        answer.consumed, answer.sampled = usage.get("input_tokens"), usage.get("output_tokens")
        return [answer]

    def join(self, events: list[bytes]) -> JoinedStream:
        found = JoinedStream({})
        pieces: dict[tuple[str, str], str] = {}
        order: list[str] = []
        numbers: list[int] = []
        for data in events:
            if data == STREAM_END:
                continue
            event = orjson.loads(data)
            kind: str = event["type"]
            order.append(kind)
            numbers.append(event.get("sequence_number", len(numbers)))
            stem, _, last = kind.rpartition(".")
            if stem in GROWING_EVENTS and last == "delta":
                key = stem, event["item_id"]
                pieces[key] = pieces.get(key, "") + event["delta"]
            elif (
                stem in GROWING_EVENTS
                and last == "done"
                and event[GROWING_EVENTS[stem]] != pieces.get((stem, event["item_id"]), "")
            ):
                found.trouble("deltas_differ", f"the deltas of {stem} do not join to what its end says")
            elif kind in END_EVENTS:
                found.body = event["response"]
        _check_order(found, order, numbers)
        joined = "".join(text for (stem, _), text in pieces.items() if stem == "response.output_text")
        if found.body and joined != self.read(found.body)[0].text:
            found.trouble("deltas_differ", "the deltas of the text do not join to the response at the end")
        return found


def _check_order(found: JoinedStream, order: list[str], numbers: list[int]) -> None:
    if not order or order[0] != "response.created":
        found.trouble("event_order", "the first event is not response.created")
    if not order or order[-1] not in END_EVENTS:
        found.trouble("no_end", "the last event is none of " + ", ".join(END_EVENTS))
    if numbers != list(range(numbers[0] if numbers else 0, len(numbers) + (numbers[0] if numbers else 0))):
        found.trouble("event_order", "sequence numbers do not count up one by one")
