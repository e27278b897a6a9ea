"""Items are an answer taken apart: whatever was answered comes back as the message it was; anything else is named."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import examples
from tests.gateway.responses.kit import ADD, Json, user

from headrace.data.errors import InvalidInput
from headrace.gateway.dialects.openai_responses import OpenAIResponses
from headrace.gateway.dialects.openai_responses.request import read_input
from headrace.gateway.dialects.shared import seal
from headrace.tokens import Message, ToolCall

words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], list[Json]]:
    """Messages, and the items that an agent keeps of them, with and without what SDKs leave out."""
    messages: list[Message] = []
    items: list[Json] = []
    for turn in range(draw(st.integers(1, 4))):
        said = draw(words)
        messages.append(Message("user", said))
        items.append(user(said))
        calls = tuple(ToolCall("add", {"a": turn}, f"c{turn}{i}") for i in range(draw(st.integers(0, 2))))
        reasoning = draw(st.none() | words)
        content = draw(words if not calls and reasoning is None else st.just("") | words)
        messages.append(Message("assistant", content, reasoning, calls))
        answer: list[Json] = []
        if reasoning is not None:
            shown = {"content": [{"type": "reasoning_text", "text": reasoning}]}
            kept = draw(st.sampled_from([shown, {"content": None, "encrypted_content": seal(reasoning)}]))
            answer.append({"type": "reasoning", "id": "rs", "summary": [], **kept})
        if content:
            parts: Any = [{"type": "output_text", "text": content, "annotations": []}]
            answer.append({"type": "message", "role": "assistant", "content": draw(st.just(content) | st.just(parts))})
        for call in calls:
            arguments = json.dumps(call.arguments)
            answer.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
        items += answer
        for call in calls:
            messages.append(Message("tool", said, tool_call_id=call.id))
            items.append({"type": "function_call_output", "call_id": call.id, "output": said})
    return messages, items


@given(conversations())
def test_what_was_answered_comes_back_as_one_message(given: tuple[list[Message], list[Json]]) -> None:
    messages, items = given
    assert list(read_input(items, continued=False)) == messages


def thought(call: str, number: int, text: str) -> Json:
    name = f"rs_{call}" + (f"_{number}" if number else "")
    return {"type": "reasoning", "id": name, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def spoken(call: str, number: int, text: str) -> Json:
    name = f"msg_{call}" + (f"_{number}" if number else "")
    return {"type": "message", "id": name, "role": "assistant", "content": [{"type": "output_text", "text": text}]}


@pytest.mark.parametrize("named", [True, False], ids=["with ids", "without"])
def test_parts_that_take_turns_are_one_answer(named: bool) -> None:
    """As a model in channels writes them: it thinks, speaks, thinks again, speaks again and calls."""
    call = {"type": "function_call", "id": "fc_0a_0", "call_id": "c", "name": "add", "arguments": "{}"}
    items = [
        thought("0a", 0, "hm"),
        spoken("0a", 0, "Well."),
        thought("0a", 1, "\nyes"),
        spoken("0a", 1, "\nSo:"),
        call,
    ]
    kept = items if named else [{name: item[name] for name in item if name != "id"} for item in items]
    found = read_input([user("hi"), *kept], continued=False)
    assert found[1:] == (Message("assistant", "Well.\nSo:", "hm\nyes", (ToolCall("add", {}, "c"),)),)


def test_answers_in_a_row_stay_two() -> None:
    items = [
        user("hi"),
        thought("0a", 0, "hm"),
        spoken("0a", 0, "Well."),
        thought("0b", 0, "on"),
        spoken("0b", 0, "So."),
    ]
    two = (Message("assistant", "Well.", "hm"), Message("assistant", "So.", "on"))
    assert read_input(items, continued=False)[1:] == two
    assert read_input([{**item, "id": None} for item in items], continued=False)[1:] == two


REQUEST: Json = {
    "model": "m",
    "instructions": "be",
    "input": [
        user("hi"),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "namespace": "math"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    ],
    "tools": [ADD, {"type": "namespace", "name": "math", "tools": [ADD]}],
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "store": False,
    "parallel_tool_calls": False,
    "max_output_tokens": 9,
    "previous_response_id": "resp_x",
}
values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON value, but the whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in ((*at, key), *places(item, (*at, key)))]


def test_the_whole_request_is_read() -> None:
    request = OpenAIResponses().read(json.dumps(REQUEST).encode())
    assert (request.previous, request.required_tools, request.single_tool_call) == ("x", ("add",), True)
    assert (request.store, request.top_logprobs) == (False, 2)


@pytest.mark.parametrize("place", places(REQUEST), ids=lambda place: ".".join(map(str, place)))
@examples(8)
@given(value=values)
def test_whatever_stands_in_its_place_is_read_or_named(place: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(REQUEST)
    holder: Any = body
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with suppress(InvalidInput):
        OpenAIResponses().read(json.dumps(body).encode())
