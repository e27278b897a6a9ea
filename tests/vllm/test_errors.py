"""What vLLM refuses, Headrace's engine refuses: with the same status and an error object of the same kind."""

from __future__ import annotations

import pytest
from tests.engine.kit import Client, Json
from tests.vllm.kit import PROMPT

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER: Json = {"role": "user", "content": "x"}

REFUSED: dict[str, tuple[str, Json]] = {
    "another model": (COMPLETIONS, {"model": "nobody", "prompt": PROMPT}),
    "another model in a chat": (CHAT, {"model": "nobody", "messages": [USER]}),
    "another model to generate": (GENERATE, {"model": "nobody", "token_ids": PROMPT, "sampling_params": {}}),
    "an id outside the vocabulary": (COMPLETIONS, {"prompt": [1, 999]}),
    "an id outside the vocabulary to generate": (GENERATE, {"token_ids": [1, 999], "sampling_params": {}}),
    "no ids": (GENERATE, {"token_ids": [], "sampling_params": {}}),
    "no sampling parameters": (GENERATE, {"token_ids": PROMPT}),
    "a prompt longer than the context": (COMPLETIONS, {"prompt": [67] * 2049}),
    "a prompt longer than the context to generate": (GENERATE, {"token_ids": [67] * 2049, "sampling_params": {}}),
    "a prompt as long as the context to generate": (GENERATE, {"token_ids": [67] * 2048, "sampling_params": {}}),
    "more tokens than the context": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2049}),
    "more tokens than the context in a chat": (CHAT, {"messages": [USER], "max_tokens": 2049}),
    "no prompt": (COMPLETIONS, {"prompt": []}),
    "an empty text": (COMPLETIONS, {"prompt": ""}),
    "no messages": (CHAT, {"messages": []}),
    "messages that are none": (CHAT, {"messages": "hello"}),
    "a wrong type": (COMPLETIONS, {"prompt": PROMPT, "temperature": "warm"}),
    "a wrong type in a chat": (CHAT, {"messages": [USER], "max_tokens": "many"}),
    "a negative temperature": (COMPLETIONS, {"prompt": PROMPT, "temperature": -1}),
    "top_p 0": (COMPLETIONS, {"prompt": PROMPT, "top_p": 0}),
    "top_p above 1": (COMPLETIONS, {"prompt": PROMPT, "top_p": 1.5}),
    "top_k -2": (COMPLETIONS, {"prompt": PROMPT, "top_k": -2}),
    "min_p above 1": (COMPLETIONS, {"prompt": PROMPT, "min_p": 1.5}),
    "a repetition penalty of 0": (COMPLETIONS, {"prompt": PROMPT, "repetition_penalty": 0}),
    "a penalty above 2": (COMPLETIONS, {"prompt": PROMPT, "frequency_penalty": 3}),
    "n 0": (COMPLETIONS, {"prompt": PROMPT, "n": 0}),
    "n null": (COMPLETIONS, {"prompt": PROMPT, "n": None}),
    "n above 1 when greedy": (COMPLETIONS, {"prompt": PROMPT, "n": 2, "temperature": 0}),
    "no tokens": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0}),
    "more least tokens than most": (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "min_tokens": 9}),
    "an empty stop string": (COMPLETIONS, {"prompt": PROMPT, "stop": ""}),
    "too many log-probs": (COMPLETIONS, {"prompt": PROMPT, "logprobs": 21}),
    "too many log-probs in a chat": (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 21}),
    "top log-probs without log-probs": (CHAT, {"messages": [USER], "top_logprobs": 2}),
    "no allowed tokens": (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": []}),
    "an allowed token outside the vocabulary": (COMPLETIONS, {"prompt": PROMPT, "allowed_token_ids": [999]}),
    "a stop token outside the vocabulary": (COMPLETIONS, {"prompt": PROMPT, "stop_token_ids": [999]}),
    "a bias outside the vocabulary": (COMPLETIONS, {"prompt": PROMPT, "logit_bias": {"999": 1}}),
    "a flag that is null": (COMPLETIONS, {"prompt": PROMPT, "ignore_eos": None}),
    "a least length that is null": (CHAT, {"messages": [USER], "min_tokens": None}),
    "an output mode that is none": (GENERATE, {"token_ids": PROMPT, "sampling_params": {}, "output_mode": "song"}),
    "stream options without a stream": (COMPLETIONS, {"prompt": PROMPT, "stream_options": {"include_usage": True}}),
    "a pause that is none": ("/pause?mode=song", {}),
    "a weight version that is a number": ("/update_weight_version", {"new_version": 8}),
    "no weight version": ("/update_weight_version", {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_as_by_vllm(ours: Client, theirs: Client, name: str) -> None:
    path, body = REFUSED[name]
    expected, theirs_said = theirs.refused(path, body)
    status, said = ours.refused(path, body)
    assert (status, said["type"]) == (expected, theirs_said["type"])
    assert theirs_said["param"] in (None, said["param"])  # where vLLM names the parameter


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
@pytest.mark.parametrize("body", [b"", b"{", b"[1]"])
def test_a_body_that_is_no_request_is_refused_as_by_vllm(ours: Client, theirs: Client, path: str, body: bytes) -> None:
    expected, theirs_said = theirs.refused(path, body)
    status, said = ours.refused(path, body)
    assert (status, said["type"]) == (expected, theirs_said["type"])


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "n", "repetition_penalty", "ignore_eos"])
def test_a_sampling_parameter_of_generate_may_not_be_null(ours: Client, theirs: Client, name: str) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {name: None}}
    assert ours.refused(GENERATE, body)[0] == theirs.refused(GENERATE, body)[0] == 400


def test_a_prompt_as_long_as_the_context_is_refused_by_both(ours: Client, theirs: Client) -> None:
    """vLLM finds fault with max_tokens, of which none are left; the engine with the prompt."""
    for server in (ours, theirs):
        assert server.refused(COMPLETIONS, {"prompt": [67] * 2048})[0] == 400


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("GET", COMPLETIONS), ("POST", "/v1/models")])
def test_a_route_that_is_not_there_is_refused_with_vllms_status(
    ours: Client, theirs: Client, method: str, path: str
) -> None:
    assert ours.send(method, path)[0] == theirs.send(method, path)[0]
