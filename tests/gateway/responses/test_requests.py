"""What a Responses request may say: what goes upstream of it, what comes back, and what is refused unrecorded."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from tests.gateway.kit import Running, forced_calls, told
from tests.gateway.responses.kit import ADD, Json, checked, events_of, respond, result, settled, text_of, user
from tests.gateway.rollout import Rollout, Say, chat, error_of, in_front, log_probs_of, uid_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
OTHER: Json = {**ADD, "name": "other"}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_a_response_is_openais_object_and_nothing_of_ours(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script.append("hello")
    asked: Json = {
        "instructions": "be brief",
        "metadata": {"run": "7"},
        "user": "me",
        "temperature": 0.5,
        "max_output_tokens": 50,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [ADD],
        "include": ["web_search_call.results"],
        "truncation": "disabled",
        "service_tier": "auto",
        "background": False,
    }
    answer = respond(gateway, base, "hi", model="any/name", **asked)
    found = told(answer)
    Response.model_validate(found)
    assert not set(found) - set(Response.model_fields) - {"store"}
    (step,) = gateway.steps(uid_of(base))
    assert found["id"] == f"resp_{step.call_id}" == f"resp_{answer.headers['x-headrace-call']}"
    assert (found["object"], found["status"], found["model"]) == ("response", "completed", "any/name")
    part = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert found["output"] == [{"id": f"msg_{step.call_id}", **item}]
    echoed = ("instructions", "metadata", "user", "temperature", "max_output_tokens", "reasoning", "text", "tools")
    assert {name: found[name] for name in echoed} == {name: asked[name] for name in echoed}
    asked_ids, sampled = len(step.prompt_ids), len(step.response_ids)
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (asked_ids, sampled)
    assert found["usage"]["total_tokens"] == asked_ids + sampled
    assert step.metadata["model"] == "any/name"


def test_a_stream_ends_in_the_same_response(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["größer 🙂 than that", "größer 🙂 than that"]
    whole = told(respond(gateway, base, "hi"))
    final = checked(events_of(respond(gateway, base, "hi", stream=True).text))
    assert text_of(final) == text_of(whole) == "größer 🙂 than that"
    own = {"id", "created_at", "output"}
    assert {k: v for k, v in final.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(gateway: Running, rollout: Rollout, base: str, stream: bool) -> None:
    rollout.script.append("a long answer that goes on")
    answer = respond(gateway, base, "hi", max_output_tokens=3, stream=stream)
    found = checked(events_of(answer.text)) if stream else told(answer)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["incomplete"]
    assert found["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_without_a_word_is_an_empty_message(
    gateway: Running, rollout: Rollout, base: str, stream: bool
) -> None:
    rollout.script.append("")
    answer = respond(gateway, base, "hi", stream=stream)
    found = checked(events_of(answer.text)) if stream else told(answer)
    assert [item["content"][0]["text"] for item in found["output"]] == [""]
    told(respond(gateway, base, [user("hi"), *found["output"], user("hello?")]))
    assert [step.metadata["cause"] for step in gateway.steps(uid_of(base))] == ["first", "extended"]


def test_words_behind_a_call_come_back_as_one_answer(gateway: Running, rollout: Rollout, base: str) -> None:
    """A stream cannot take back the message that it ended; the next turn goes on from the tokens all the same."""
    rollout.script += [f"One moment. {CALL} There."]
    final = checked(events_of(respond(gateway, base, "hi", tools=[ADD], stream=True).text))
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "message"]
    output = {"type": "function_call_output", "call_id": final["output"][1]["call_id"], "output": "3"}
    told(respond(gateway, base, [user("hi"), *final["output"], output], tools=[ADD]))
    assert [step.metadata["cause"] for step in gateway.steps(uid_of(base))] == ["first", "extended"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_answered_when_included(gateway: Running, rollout: Rollout, base: str, stream: bool) -> None:
    rollout.script.append("hello there")
    asked: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    answer = respond(gateway, base, "hi", **asked)
    found = checked(events_of(answer.text)) if stream else told(answer)
    entries = found["output"][0]["content"][0]["logprobs"]
    ids = [*rollout.vocabulary.encode("hello there"), rollout.end]
    assert [entry["logprob"] for entry in entries] == log_probs_of(ids)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert found["top_logprobs"] == 2


def test_ids_are_shown_to_an_agent_that_asks_for_them(gateway: Running, base: str) -> None:
    found = told(respond(gateway, base, "hi", return_token_ids=True))
    (step,) = gateway.steps(uid_of(base))
    assert (found["prompt_token_ids"], found["token_ids"]) == (step.prompt_ids.tolist(), step.response_ids.tolist())


# -- what goes upstream ------------------------------------------------------------------------------------------------


def test_the_same_conversation_has_the_same_ids_as_in_chat(gateway: Running, rollout: Rollout, base: str) -> None:
    tool = {"type": "function", "function": {name: ADD[name] for name in ("name", "description", "parameters")}}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}
    messages: list[Json] = [
        {"role": "system", "content": "be brief"},
        user("a"),
        {"role": "assistant", "content": "well:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    told(chat(gateway, base, messages, tools=[tool]))
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well:"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1,"b":2}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "3"}]},
    ]
    told(respond(gateway, base, items, instructions="be brief", tools=[ADD]))
    told(respond(gateway, base, [{"role": "developer", "content": "be brief"}, *items], tools=[ADD]))
    first, *others = [order["prompt"] for order in rollout.orders]
    assert others == [first, first]


def test_parameters_go_upstream_and_what_means_nothing_there_does_not(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    quiet = {"user": "me", "metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k", "safety_identifier": "s"}
    noted: Json = {"client_metadata": {"x": "y"}, "max_tool_calls": 3, "reasoning": {"effort": "high"}}
    told(respond(gateway, base, "hi", temperature=0.3, top_p=0.9, max_output_tokens=7, top_k=5, **quiet, **noted))
    (order,) = rollout.orders
    sent = {name: order[name] for name in ("temperature", "top_p", "max_tokens", "top_k")}
    assert sent == {"temperature": 0.3, "top_p": 0.9, "max_tokens": 7, "top_k": 5}
    assert not {*quiet, *noted, "input", "instructions"} & set(order)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}}, {"json": {"type": "object"}}),
    ],
)
def test_a_format_becomes_what_the_server_honours(
    gateway: Running, rollout: Rollout, base: str, given: Json, sent: Any
) -> None:
    assert told(respond(gateway, base, "hi", text={"format": given}))["text"]["format"] == given
    assert rollout.orders[0].get("structured_outputs") == sent


def test_the_helper_for_parsing_reads_structured_outputs(gateway: Running, rollout: Rollout, base: str) -> None:
    class Sum(BaseModel):
        value: int

    rollout.script.append('{"value": 5}')
    with openai.OpenAI(**settled(base)) as client:
        assert client.responses.parse(model="any", input="2 + 3", text_format=Sum).output_parsed == Sum(value=5)
    assert rollout.orders[0]["structured_outputs"]["json"]["properties"]["value"]["type"] == "integer"


@pytest.mark.parametrize(
    ("choice", "offered"),
    [
        ("required", ["add", "other"]),
        ({"type": "function", "name": "other"}, ["other"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}, ["add"]),
    ],
)
def test_a_tool_that_must_be_called_is_a_grammar_upstream(
    gateway: Running, rollout: Rollout, base: str, choice: Any, offered: list[str]
) -> None:
    rollout.script.append(CALL)
    found = told(respond(gateway, base, "hi", tools=[ADD, OTHER], tool_choice=choice))
    assert [item["type"] for item in found["output"]] == ["function_call"]
    assert found["tool_choice"] == choice
    begun = forced_calls(rollout.orders[0])
    assert [name for each in begun for name in ("add", "other") if f'"{name}"' in each] == offered


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_are_called_by_both_names(
    gateway: Running, rollout: Rollout, base: str, stream: bool
) -> None:
    rollout.script.append('<tool_call>\n{"name": "math.add", "arguments": {"a": 1, "b": 2}}\n</tool_call>')
    asked: Json = {"tools": [OTHER, {"type": "namespace", "name": "math", "description": "Sums.", "tools": [ADD]}]}
    answer = respond(gateway, base, "hi", stream=stream, **asked)
    found = checked(events_of(answer.text)) if stream else told(answer)
    (call,) = found["output"]
    assert (call["namespace"], call["name"]) == ("math", "add")
    told(respond(gateway, base, [user("hi"), call, result(call)], **asked))
    assert '"math.add"' in rollout.vocabulary.decode(rollout.orders[0]["prompt"])
    assert [step.metadata["cause"] for step in gateway.steps(uid_of(base))] == ["first", "extended"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_are_not_to_be_called_and_calls_that_are_not_to_be_two(
    gateway: Running, rollout: Rollout, base: str, stream: bool
) -> None:
    rollout.script += [CALL, f"{CALL}\n{CALL}"]
    shown = []
    for more in ({"tool_choice": "none"}, {"parallel_tool_calls": False}):
        answer = respond(gateway, base, "hi", tools=[ADD], stream=stream, **more)
        found = checked(events_of(answer.text)) if stream else told(answer)
        shown.append([item["type"] for item in found["output"]])
    assert shown == [["message"], ["function_call"]]


# -- what is refused ---------------------------------------------------------------------------------------------------

FOREIGN = base64.b64encode(b"not ours").decode()
CALLED: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Json = {"type": "function_call_output", "call_id": "c", "output": "x"}
BAD_INPUTS: list[Any] = [
    None,
    [],
    {},
    7,
    [None],
    ["hi"],
    [[]],
    [{}],
    [{"type": 7}],
    [{"type": "message"}],
    [{"type": "message", "role": "wizard", "content": "x"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": [7]}],
    [{"role": "user", "content": [{"type": "input_text"}]}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}],
    [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"type": "item_reference"}],
    [{"type": "item_reference", "id": 7}],
    *([{"type": kind}] for kind in ("web_search_call", "computer_call", "custom_tool_call", "mcp_call", "compaction")),
    [{**CALLED, "call_id": None}],
    [{**CALLED, "call_id": ""}],
    [{**CALLED, "name": 7}],
    [{**CALLED, "namespace": 7}],
    [{**CALLED, "arguments": {"a": 1}}],
    [{**CALLED, "arguments": None}],
    [user("hi"), OUTPUT],
    [CALLED, {**OUTPUT, "call_id": "other"}],
    [CALLED, {**OUTPUT, "call_id": 7}],
    [CALLED, {**OUTPUT, "output": None}],
    [CALLED, {**OUTPUT, "output": 7}],
    [CALLED, {**OUTPUT, "output": [{"type": "input_image", "image_url": "x"}]}],
    [{"type": "reasoning", "summary": "x"}],
    [{"type": "reasoning", "summary": [], "content": "x"}],
    [{"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "x"}]}],
    [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": 7}]}],
    [{"type": "reasoning", "summary": [], "encrypted_content": 7}],
    [{"type": "reasoning", "summary": [], "encrypted_content": FOREIGN}],
    [{"type": "reasoning", "summary": [], "encrypted_content": "headrace1.é"}],
]
BAD_FIELDS: list[tuple[Json, str]] = [
    ({"previous_response_id": 7}, "previous_response_id"),
    ({"instructions": ["x"]}, "instructions"),
    ({"model": 7}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"store": "no"}, "store"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"user": 7}, "user"),
    ({"include": "x"}, "include"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"text": "json"}, "text"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": "json_object"}}, "text.format"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": 7}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"tools": {}}, "tools"),
    ({"tools": [7]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "chat's form"}}]}, "tools"),
    ({"tools": [{**ADD, "parameters": 7}]}, "tools"),
    ({"tools": [{"type": "namespace", "tools": [ADD]}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "math", "tools": ADD}]}, "tools"),
    ({"tools": [{"type": "namespace", "name": "math", "tools": [{"type": "custom", "name": "x"}]}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 7}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "required"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [7]}}, "tool_choice"),
    (
        {"tools": [ADD, OTHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ADD]}},
        "tool_choice",
    ),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"max_tool_calls": "1"}, "max_tool_calls"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"messages": [user("hi")]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": True}, "logprobs"),
    ({"functions": [{}]}, "functions"),
]


@pytest.fixture
def nothing_recorded(gateway: Running, rollout: Rollout, base: str) -> Iterator[str]:
    """The base_url of a trajectory that must be empty when the test ends, with nothing asked upstream."""
    yield base
    assert gateway.steps(uid_of(base)) == []
    assert rollout.orders == []


@pytest.mark.parametrize("given", BAD_INPUTS, ids=lambda given: json.dumps(given)[:60])
def test_input_that_cannot_be_read_is_400(gateway: Running, nothing_recorded: str, given: Any) -> None:
    found = error_of(respond(gateway, nothing_recorded, given), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", "input")
    assert "input" in found["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda given: str(given)[:60])
def test_a_field_that_cannot_be_taken_is_named(
    gateway: Running, nothing_recorded: str, fields: Json, param: str
) -> None:
    found = error_of(respond(gateway, nothing_recorded, "hi", **fields), 400)
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert param in found["message"]


@pytest.mark.parametrize("depth", [300, 100_000])
def test_json_nested_past_all_measure_is_no_traceback(gateway: Running, base: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    items = [user("hi"), {**CALLED, "arguments": deep}, OUTPUT]
    assert respond(gateway, base, items).status_code in (200, 400)
    tool = f'{{"type": "function", "name": "f", "parameters": {{"x": {deep}}}}}'
    for stream in ("false", "true"):
        body = f'{{"input": "hi", "tools": [{tool}], "stream": {stream}}}'.encode()
        answer = gateway.post(f"{base}/v1/responses", body)
        assert answer.status_code in (200, 400)
        assert "response.failed" not in answer.text


def test_a_stream_that_fails_says_so_in_its_last_events(gateway: Running, rollout: Rollout, base: str) -> None:
    async def broken(asked: Json, writer: Any) -> None:
        writer.transport.abort()

    gate = rollout.gate()
    gate.open()
    rollout.script.append(Say("one two three", after=(3, gate), then=broken))
    *events, error, failed = events_of(respond(gateway, base, "hi", stream=True).text)
    assert events[0]["type"] == "response.created"
    assert error["type"] == "error"
    assert error["message"]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["sequence_number"] == len(events) + 1
    assert gateway.steps(uid_of(base)) == []
