"""Bodies of calls with anything in any field, in every dialect: read, or refused with the field named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.fuzzing import corpus, damaged, deep, examples, mutated
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, in_front, uid_of

from headrace.data.errors import HeadraceError
from headrace.gateway.dialects.anthropic_messages import AnthropicMessages
from headrace.gateway.dialects.openai import OpenAIChat
from headrace.gateway.dialects.openai_completions import OpenAICompletions
from headrace.gateway.dialects.openai_responses import OpenAIResponses
from headrace.gateway.http import decode_body
from headrace.gateway.routes import bodies
from headrace.gateway.sessions import Session

Json = dict[str, Any]
CORPUS = Path(__file__).parent / "corpus"
#: One red pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC"
PNG = f"data:image/png;base64,{PIXEL}"
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SAMPLING: Json = {"temperature": 1.0, "top_p": 0.9, "stop": ["x"], "seed": 7, "logit_bias": {"5": 1}, "n": 1}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": PNG}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 9,
    "logprobs": True,
    "top_logprobs": 2,
    "user": "u",
    **SAMPLING,
}
COMPLETION: Json = {"model": "m", "prompt": ["hi", "ho"], "max_tokens": 9, "logprobs": 2, "echo": False, **SAMPLING}
RESPONSE: Json = {
    "model": "m",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": PNG}]},
        {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
    "reasoning": {"effort": "low"},
    "previous_response_id": None,
    "max_output_tokens": 9,
    "store": True,
}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}],
        },
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "add"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "temperature": 1.0,
}
DIALECTS: dict[str, tuple[Any, Json]] = {
    "chat/completions": (OpenAIChat().read, CHAT),
    "completions": (OpenAICompletions().read, COMPLETION),
    "responses": (OpenAIResponses().read, RESPONSE),
    "messages": (AnthropicMessages().read, MESSAGES),
    "messages/count_tokens": (AnthropicMessages().read_count, {k: v for k, v in MESSAGES.items() if k != "max_tokens"}),
}


def read(route: str, body: bytes) -> None:
    """Reads a body; what is wrong with it is said as a refusal, or, nested past all measure, found by the caller."""
    try:
        DIALECTS[route][0](body)
    except (HeadraceError, RecursionError):
        pass


def test_what_is_valid_is_read() -> None:
    for parse, valid in DIALECTS.values():
        parse(json.dumps(valid).encode())


@examples(120)
@given(route=st.sampled_from(sorted(DIALECTS)), data=st.data())
def test_any_value_in_any_field_is_read_or_refused(route: str, data: st.DataObject) -> None:
    read(route, json.dumps(data.draw(mutated(DIALECTS[route][1]))).encode())


@examples(80)
@given(route=st.sampled_from(sorted(DIALECTS)), data=st.data())
def test_any_bytes_are_read_or_refused(route: str, data: st.DataObject) -> None:
    read(route, data.draw(damaged(json.dumps(DIALECTS[route][1]).encode())))


#: The bodies of the other routes, with a valid one each.
PLAIN: list[tuple[Any, Json]] = [
    (
        bodies.InitTrajectoryBody,
        {"trajectory_uid": "t", "prompt_uid": "p", "channel": "c", "metadata": {}, "n_rollouts": 2},
    ),
    (bodies.RewardBody, {"reward": 1.0, "step_index": 0, "source": "s", "info": {}}),
    (bodies.CompleteTrajectoryBody, {"reward": 1.0, "min_steps": 1}),
    (bodies.FailTrajectoryBody, {"reason": "r"}),
    (bodies.FeedbackBody, {"response_id": "x", "reward": 1.0, "comment": "c"}),
    (bodies.GenerateBody, {"prompt_ids": [1]}),
    (bodies.SubmitStepsBody, {"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t"}]}),
    (bodies.TrajectoryStatesBody, {"trajectory_uids": ["t"]}),
]


@examples(80)
@given(which=st.sampled_from(PLAIN), data=st.data())
def test_the_bodies_of_other_routes_are_read_or_refused(which: tuple[Any, Json], data: st.DataObject) -> None:
    kind, valid = which
    whole = json.dumps(valid).encode()
    body = data.draw(st.one_of(damaged(whole), mutated(valid).map(lambda value: json.dumps(value).encode())))
    try:
        decode_body(body, kind)
    except HeadraceError:
        pass


# -- a whole gateway ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


def answered(gateway: Running, route: str, body: bytes) -> None:
    """A 200, or an error of the caller's own; never the gateway's."""
    base = gateway.init()["base_url"]
    found = gateway.post(f"{base}/v1/{route}", body)
    assert found.status_code < 500, (route, body, found.text)


@examples(40)
@given(route=st.sampled_from(sorted(DIALECTS)), data=st.data())
def test_no_body_makes_a_gateway_fail(gateway: Running, route: str, data: st.DataObject) -> None:
    valid = {name: value for name, value in DIALECTS[route][1].items() if name not in ("tool_choice", "stream")}
    answered(gateway, route, json.dumps(data.draw(mutated(valid, most=1))).encode())


@pytest.mark.parametrize("case", corpus(CORPUS), ids=lambda path: path.stem)
def test_a_body_that_was_a_failure_once_is_refused(gateway: Running, case: Path) -> None:
    for route in DIALECTS:
        answered(gateway, route, case.read_bytes())


def test_a_value_that_is_nested_past_all_measure_is_refused(gateway: Running) -> None:
    for route, (_, valid) in DIALECTS.items():
        for field in ("messages", "input", "prompt", "tools", "metadata", "unknown"):
            text = json.dumps({**valid, field: 0}).encode()
            answered(gateway, route, text.replace(b": 0", b": " + json.dumps(deep(depth=900)).encode()))


@pytest.mark.parametrize("own", ["a text", 7, [], {"length": "long"}, {"length": 2}], ids=repr)
def test_a_flows_own_words_in_a_steps_metadata_are_passed_over(gateway: Running, own: Any) -> None:
    """Under the names that the gateway uses itself: whoever finds the trajectory again reads them."""
    base = gateway.init()["base_url"]
    told(gateway.post(f"{base}/v1/completions", {"model": "m", "prompt": "hi"}))
    (made,) = gateway.steps(uid_of(base))
    session = Session(made.trajectory_uid, made.prompt_uid, "train")
    session.read([made])
    assert len(session.texts) == 1
    session = Session(made.trajectory_uid, made.prompt_uid, "train")
    session.read([replace(made, metadata={**made.metadata, "text": own, "choice": own, "kept": own})])
    assert (session.steps, session.texts) == (1, [])
