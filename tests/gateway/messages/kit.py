"""The `anthropic` SDK as agents use it, and what a conversation through it is held to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import anthropic
from jiter import from_json
from tests.gateway.kit import Json
from tests.gateway.tool_model import ADD

#: The tool that the taught model knows, as Anthropic's API has it.
TOOL: Json = {
    "name": "add",
    "description": ADD["function"]["description"],
    "input_schema": ADD["function"]["parameters"],
}
#: How agents read an answer.
WAYS = ("whole", "events", "helper")


def settled(base_url: str, **more: Any) -> Json:
    return {"base_url": base_url, "api_key": "none", "max_retries": 0, **more}


def answered(client: anthropic.Anthropic, way: str, asked: Json) -> anthropic.types.Message:
    match way:
        case "whole":
            return client.messages.create(**asked)
        case "helper":
            with client.messages.stream(**asked) as stream:
                return stream.get_final_message()
        case _:
            return put_together(client.messages.create(**asked, stream=True))


async def answered_async(client: anthropic.AsyncAnthropic, way: str, asked: Json) -> anthropic.types.Message:
    match way:
        case "whole":
            return await client.messages.create(**asked)
        case "helper":
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_message()
        case _:
            events: AsyncIterator[Any] = await client.messages.create(**asked, stream=True)
            return put_together([event async for event in events])


def put_together(events: Iterable[Any]) -> anthropic.types.Message:
    """The message that events amount to, if they come in the documented order."""
    first, *rest = events
    assert first.type == "message_start"
    message: Json = first.message.model_dump()
    assert (message["content"], message["stop_reason"]) == ([], None)
    *blocks, ended, last = rest
    assert (ended.type, last.type) == ("message_delta", "message_stop")
    inputs: list[list[str]] = []
    for event in blocks:
        match event.type:
            case "content_block_start":
                assert event.index == len(message["content"])
                message["content"].append(event.content_block.model_dump())
                inputs.append([])
            case "content_block_delta":
                assert event.index == len(message["content"]) - 1
                _add(message["content"][-1], event.delta, inputs[-1])
            case kind:
                assert (kind, event.index) == ("content_block_stop", len(message["content"]) - 1)
    was_cut = ended.delta.stop_reason == "max_tokens"
    for at, texts in enumerate(inputs):
        if texts:
            # Of a call that was cut off, as much as there is, as the SDK's own helper reads it.
            is_cut = was_cut and at == len(inputs) - 1
            message["content"][at]["input"] = from_json("".join(texts).encode(), partial_mode=is_cut)
    message.update(stop_reason=ended.delta.stop_reason, stop_sequence=ended.delta.stop_sequence)
    message["usage"]["output_tokens"] = ended.usage.output_tokens
    return anthropic.types.Message.model_validate(message)


def _add(block: Json, delta: Any, texts: list[str]) -> None:
    match delta.type:
        case "text_delta":
            block["text"] += delta.text
        case "thinking_delta":
            block["thinking"] += delta.thinking
        case "signature_delta":
            block["signature"] += delta.signature
        case kind:
            assert kind == "input_json_delta"
            texts.append(delta.partial_json)


def added(block: anthropic.types.ToolUseBlock) -> Json:
    """The tool, and its result as a block."""
    given: Any = block.input
    try:
        return result(block, str(given["a"] + given["b"]))
    except (KeyError, TypeError):
        return result(block, "add wants the numbers a and b", is_error=True)


def result(block: anthropic.types.ToolUseBlock, content: Any, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": block.id, "content": content, **more}


def calls_of(message: anthropic.types.Message) -> list[anthropic.types.ToolUseBlock]:
    return [block for block in message.content if block.type == "tool_use"]


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
