"""What cannot be answered is refused with a 4xx in vLLM's shape; nothing takes the engine down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.engine.kit import Client

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

COMPLETIONS: dict[str, Any] = {
    "no prompt": {},
    "an empty prompt": {"prompt": ""},
    "an empty list": {"prompt": []},
    "an empty list within": {"prompt": [[1], []]},
    "a prompt of objects": {"prompt": [{}]},
    "a prompt of mixed things": {"prompt": [1, "a"]},
    "a fraction among ids": {"prompt": [1, 2.5]},
    "a truth among ids": {"prompt": [1, True]},
    "a negative id": {"prompt": [-1]},
    "an id beyond the vocabulary": {"prompt": [1, 365]},
    "an enormous id": {"prompt": [2**70]},
    "a prompt as long as the context": {"prompt": [5] * 2048},
    "more tokens than the whole context": {"prompt": [5], "max_tokens": 2049},
    "a flag that is null": {"prompt": [5], "ignore_eos": None},
    "stream options without a stream": {"prompt": [5], "stream_options": {"include_usage": True}},
    "no tokens": {"prompt": [5], "max_tokens": 0},
    "tokens in words": {"prompt": [5], "max_tokens": "many"},
    "a negative temperature": {"prompt": [5], "temperature": -1},
    "a temperature without end": {"prompt": [5], "temperature": 1e999},
    "top_p of nothing": {"prompt": [5], "top_p": 0},
    "top_k below its least": {"prompt": [5], "top_k": -2},
    "min_p beyond one": {"prompt": [5], "min_p": 1.5},
    "no choices": {"prompt": [5], "n": 0},
    "choices without chance": {"prompt": [5], "n": 2, "temperature": 0},
    "too many log-probs": {"prompt": [5], "logprobs": 21},
    "negative log-probs": {"prompt": [5], "logprobs": -1},
    "a seed beyond 64 bits": {"prompt": [5], "seed": 2**63},
    "a bias beyond the vocabulary": {"prompt": [5], "logit_bias": {"365": 1}},
    "a bias on a word": {"prompt": [5], "logit_bias": {"a": 1}},
    "an empty stop string": {"prompt": [5], "stop": [""]},
    "a stop token beyond the vocabulary": {"prompt": [5], "stop_token_ids": [365]},
    "more least than most tokens": {"prompt": [5], "min_tokens": 9, "max_tokens": 3},
    "a penalty out of range": {"prompt": [5], "presence_penalty": 3},
    "a repetition penalty of zero": {"prompt": [5], "repetition_penalty": 0},
    "nothing allowed": {"prompt": [5], "allowed_token_ids": []},
    "structured outputs": {"prompt": [5], "structured_outputs": {"json": {}}},
    "a response format": {"prompt": [5], "response_format": {"type": "json_object"}},
    "echo": {"prompt": [5], "echo": True},
    "a list": [1],
    "a string": "prompt",
    "nothing": None,
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_bad_completion_is_refused(engine: Client, name: str) -> None:
    body = COMPLETIONS[name]
    status, error = engine.refused("/v1/completions", json.dumps(body).encode())
    assert status == 400
    assert error["message"]


CHATS: dict[str, Any] = {
    "no messages": {},
    "empty messages": {"messages": []},
    "a message that is none": {"messages": ["hi"]},
    "a message without a role": {"messages": [{"content": "hi"}]},
    "content that is a number": {"messages": [{"role": "user", "content": 7}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "a call without a name": {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "a call with broken arguments": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]
    },
    "calls that are no list": {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
    "tools that are no list": {"messages": MESSAGES, "tools": "add"},
    "a required tool": {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
    "a response format": {"messages": MESSAGES, "response_format": {"type": "json_object"}},
    "too many log-probs": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21},
    "a conversation beyond the context": {"messages": [{"role": "user", "content": "x " * 3000}]},
}


@pytest.mark.parametrize("name", CHATS)
def test_a_bad_chat_is_refused(engine: Client, name: str) -> None:
    status, error = engine.refused("/v1/chat/completions", CHATS[name])
    assert status == 400
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/inference/v1/generate", {"token_ids": [999], "sampling_params": {}}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": "a"}),
        ("/pause?mode=never", None),
        ("/update_weight_version", {"new_version": 7}),
        ("/load_weights_shm", {"name": "x", "manifest": [{"name": "y"}]}),
        ("/abort_requests", {"request_ids": "a"}),
        ("/collective_rpc", {}),
    ],
)
def test_other_bad_requests_are_refused(engine: Client, path: str, body: Any) -> None:
    assert engine.refused(path, body)[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"prompt": [1, NaN]}', b"[" * 10_000])
def test_what_is_no_json_is_refused(engine: Client, path: str, body: bytes) -> None:
    assert engine.refused(path, body)[0] == 400


def test_another_model_is_not_found_on_any_route(engine: Client) -> None:
    bodies = {
        "/v1/completions": {"prompt": [1]},
        "/v1/chat/completions": {"messages": MESSAGES},
        "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        assert engine.refused(path, {**body, "model": "gpt-5"})[0] == 404


def test_what_is_not_there_is_said_in_the_same_shape(engine: Client) -> None:
    assert engine.refused("/v1/responses", {})[0] == 404
    assert engine.refused("/v1/models", {})[0] == 405


def test_weights_that_are_not_there_are_an_error_that_names_them(engine: Client, tmp_path: Path) -> None:
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "nowhere")}}
    status, error = engine.refused("/collective_rpc", rpc)
    assert status == 500
    assert "nowhere" in error["message"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "presence_penalty",
    "repetition_penalty",
    "stream_options",
    "allowed_token_ids",
]


@hypothesis_settings(max_examples=150)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=3), prompt=ANYTHING | st.just([5]))
def test_no_field_makes_the_engine_fail(engine: Client, fields: dict[str, Any], prompt: Any) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": 2,
        **fields,
        "n": min(fields.get("n", 1), 9) if type(fields.get("n")) is int else 1,
    }
    status, _ = engine.send("POST", "/v1/completions", body)
    assert status in (200, 400)
    assert engine.complete([5], max_tokens=1)["token_ids"]
