"""A turn as OpenAI's response object: the items of its output, how it ended, and the request's fields again."""

from __future__ import annotations

from typing import Any

from headrace.gateway.call.turn import Choice, Turn
from headrace.gateway.dialects import openai
from headrace.gateway.dialects.openai_responses.names import ItemName
from headrace.gateway.dialects.seal import seal
from headrace.gateway.dialects.tools import arguments_text
from headrace.tokens import ToolCall

Json = dict[str, Any]

PREFIX = "resp_"


def response(turn: Turn, status: str, output: list[Json], **more: Any) -> Json:
    """The object, as far as it has come."""
    ask, sampling = turn.ask, turn.order.sampling
    return {
        "id": PREFIX + turn.call_id,
        "object": "response",
        "created_at": turn.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": not ask.one_call,
        "previous_response_id": None if ask.previous is None else PREFIX + ask.previous,
        "store": ask.keep,
        "temperature": sampling.get("temperature"),
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        **ask.notes.echo,
        **more,
    }


def ended(turn: Turn, output: list[Json]) -> Json:
    """The object of an answer that is whole, or was cut at its length."""
    (choice,) = turn.choices
    more: Json = {"usage": _usage(turn, choice)}
    if turn.ask.show_ids:
        more |= {"prompt_token_ids": turn.plan.ids.tolist(), "token_ids": choice.ids}
    if is_cut(choice):
        return response(turn, "incomplete", output, incomplete_details={"reason": "max_output_tokens"}, **more)
    return response(turn, "completed", output, **more)


def is_cut(choice: Choice) -> bool:
    return choice.finish_reason == "length"


def output_of(turn: Turn) -> list[Json]:
    """Reasoning, text and calls, each an item."""
    (choice,) = turn.choices
    message = choice.message(one_call=turn.ask.one_call)
    items: list[Json] = []
    if message.reasoning:
        items.append(reasoning_item(turn, message.reasoning))
    if message.content or not (items or message.tool_calls):
        logprobs = [] if turn.ask.tops is None else openai.token_entries(choice, 0, turn.ask.tops)
        items.append(text_item(turn, 0, message.content, logprobs))
    items += [call_item(turn, number, call) for number, call in enumerate(message.tool_calls)]
    if is_cut(choice) and not message.tool_calls:
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(turn: Turn, text: str, status: str = "completed") -> Json:
    parts = [reasoning_part(text)] if status != "in_progress" else []
    name = str(ItemName("rs", turn.call_id))
    item: Json = {"id": name, "type": "reasoning", "status": status, "summary": [], "content": parts}
    if turn.ask.notes.seal and parts:
        item["encrypted_content"] = seal(text)
    return item


def text_item(turn: Turn, number: int, text: str, logprobs: list[Json], status: str = "completed") -> Json:
    """The text, or where calls came between, a part of it."""
    parts = [text_part(text, logprobs)] if status != "in_progress" else []
    name = str(ItemName("msg", turn.call_id, number))
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": parts}


def call_item(turn: Turn, number: int, call: ToolCall, status: str = "completed") -> Json:
    space, dot, name = call.name.partition(".")
    within = bool(dot) and space in turn.ask.notes.namespaces
    return {
        "id": str(ItemName("fc", turn.call_id, number)),
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        **({"namespace": space} if within else {}),
        "name": name if within else call.name,
        "arguments": arguments_text(call) if status != "in_progress" else "",
    }


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(turn: Turn, choice: Choice) -> Json:
    asked, answered = len(turn.plan.ids), len(choice.ids)
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": asked + answered,
    }
