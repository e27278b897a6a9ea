"""`/v1/completions` of Headrace's engine answers as vLLM's does: the same shapes, and the same values where both are
greedy."""

from __future__ import annotations

import pytest
from tests.engine.kit import Client, Json, Reference, gap
from tests.vllm.kit import PROMPT, TOLERANCE, agree, both, stream_alike, tell_alike

PATH = "/v1/completions"
#: Tokens are told by their ids: the strings of tokens that are half a character are told differently (see below).
GREEDY: Json = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 8,
    "return_token_ids": True,
    "logprobs": 1,
    "return_tokens_as_token_ids": True,
}

REQUESTS: dict[str, Json] = {
    "ids": {},
    "text": {"prompt": "guess a number"},
    "several prompts": {"prompt": [[1, 5, 9], PROMPT]},
    "several texts": {"prompt": ["higher", "lower"]},
    "no log-probs": {"logprobs": None},
    "log-probs of the sampled alone": {"logprobs": 0},
    "five log-probs": {"logprobs": 5},
    "tokens as strings": {"return_tokens_as_token_ids": None},
    "no ids": {"return_token_ids": None},
    "log-probs of the prompt": {"prompt_logprobs": 1},
    "log-probs of the prompt alone": {"prompt_logprobs": 0, "logprobs": None},
    "default length": {"max_tokens": None},
    "a stop token": {"stop_token_ids": [364]},
    "a stop token that is told": {"stop_token_ids": [364], "include_stop_str_in_output": True},
    "a stop string": {"stop": "</tool_"},
    "a stop string that is told": {"stop": ["</tool_"], "include_stop_str_in_output": True},
    "a stop string within a token": {"stop": ["n"]},
    "the first of two stop strings": {"stop": ["ant", "</tool_call>"]},
    "a stop string after the least": {"stop": ["</tool_call>"], "min_tokens": 4},
    "a stop string that does not come": {"stop": ["nowhere to be seen"]},
    "EOS": {"logit_bias": {"2": 100}},
    "EOS as a stop token": {"logit_bias": {"2": 100}, "stop_token_ids": [2]},
    "EOS with special tokens told": {"logit_bias": {"2": 100}, "skip_special_tokens": False},
    "EOS that is told": {"logit_bias": {"2": 100}, "include_stop_str_in_output": True, "skip_special_tokens": False},
    "EOS ignored": {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 3},
    "EOS ignored and told": {
        "logit_bias": {"2": 100},
        "ignore_eos": True,
        "max_tokens": 3,
        "skip_special_tokens": False,
    },
    "EOS after the least": {"logit_bias": {"2": 100}, "min_tokens": 3},
    "half a character": {"prompt": [1, 5, 9], "max_tokens": 3},
    "characters of several tokens": {"prompt": [1, 5, 9], "max_tokens": 12, "ignore_eos": True},
    "special tokens": {"prompt": PROMPT, "allowed_token_ids": [0, 1, 364], "max_tokens": 4},
    "special tokens told": {"allowed_token_ids": [0, 1, 364], "max_tokens": 4, "skip_special_tokens": False},
    "some tokens alone": {"allowed_token_ids": [67, 68], "logprobs": 3},
    "a repetition penalty": {"repetition_penalty": 1.3},
    "a presence penalty": {"presence_penalty": 1.5},
    "a frequency penalty": {"frequency_penalty": 0.7},
    "a negative penalty": {"frequency_penalty": -0.5, "presence_penalty": -0.5},
    "parameters that are off": {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": None, "repetition_penalty": 1.0},
    "parameters that are null": {"top_k": None, "top_p": None, "min_p": None, "stop": None, "stop_token_ids": None},
    "to the end of the context": {"prompt": [1, *[67] * 2044], "max_tokens": 3},
    "more tokens than there is room": {"prompt": [67] * 2040, "max_tokens": 9, "ignore_eos": True},
    "no room for the default length": {"prompt": [67] * 2040, "max_tokens": None, "ignore_eos": True},
    "a field that nobody knows": {"nobody_knows": 1},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_whole_answer_is_vllms(ours: Client, theirs: Client, name: str) -> None:
    both(ours, theirs, PATH, {"prompt": PROMPT, **GREEDY, **REQUESTS[name]})


@pytest.mark.parametrize("name", REQUESTS)
def test_a_streamed_answer_tells_the_same_text_after_as_many_tokens(ours: Client, theirs: Client, name: str) -> None:
    body = {"prompt": PROMPT, **GREEDY, **REQUESTS[name]}
    if body.get("prompt_logprobs") is not None:
        body.pop("prompt_logprobs")  # vLLM has no place for them in a stream
    tell_alike(ours.chunks(PATH, body), theirs.chunks(PATH, body))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logprobs": None},
        {"return_token_ids": None},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 2, "temperature": 1, "ignore_eos": True},
    ],
    ids=str,
)
def test_a_streams_chunks_have_the_shapes_of_vllms(ours: Client, theirs: Client, asked: Json) -> None:
    body = {"prompt": PROMPT, **GREEDY, **asked}
    stream_alike(ours, theirs, PATH, body)


def test_streamed_log_probs_are_vllms(ours: Client, theirs: Client) -> None:
    body = {"prompt": PROMPT, **GREEDY}

    def logprobs(chunks: list[Json]) -> Json:
        found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for chunk in chunks:
            for key, value in chunk["choices"][0]["logprobs"].items():
                found[key] += value
        return found

    agree(logprobs(ours.chunks(PATH, body)), logprobs(theirs.chunks(PATH, body)))


def test_n_answers_count_the_prompt_once(ours: Client, theirs: Client) -> None:
    body = {"prompt": PROMPT, **GREEDY, "temperature": 1, "n": 3, "seed": 1, "ignore_eos": True}
    mine, other = ours.post(PATH, body), theirs.post(PATH, body)
    agree(mine["usage"], other["usage"])
    assert [choice["index"] for choice in mine["choices"]] == [choice["index"] for choice in other["choices"]]
    assert [shape_of(choice) for choice in mine["choices"]] == [shape_of(choice) for choice in other["choices"]]


def shape_of(choice: Json) -> list[tuple[str, str]]:
    return [(key, type(value).__name__) for key, value in choice.items()]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_sampled_log_probs_are_those_of_the_model_at_that_temperature(
    ours: Client, theirs: Client, reference: Reference, temperature: float
) -> None:
    for server in (ours, theirs):
        found = server.complete(PROMPT, temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
        expected = reference.logprobs(PROMPT, found["token_ids"], temperature)
        assert gap(found["logprobs"]["token_logprobs"], expected) < TOLERANCE


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_log_probs_of_a_forced_prompt_are_vllms(ours: Client, theirs: Client, temperature: float) -> None:
    sampled = theirs.complete(PROMPT, temperature=1.0, max_tokens=60, seed=4, ignore_eos=True)["token_ids"]
    body = {"prompt": PROMPT + sampled, "max_tokens": 1, "prompt_logprobs": 2, "temperature": temperature}
    mine, other = (server.post(PATH, body)["choices"][0]["prompt_logprobs"] for server in (ours, theirs))
    for one, two in zip(mine[1:], other[1:], strict=True):
        for entry in (*one.values(), *two.values()):
            entry.pop("decoded_token")
        agree(one, two)


def test_a_token_that_is_half_a_character_is_told_as_a_replacement_and_by_vllm_not_at_all(
    ours: Client, theirs: Client
) -> None:
    """The one string of an answer that differs: vLLM tells the character with the token that completes it."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 2, "allowed_token_ids": [129], "logprobs": 0}
    mine, other = (server.post(PATH, body)["choices"][0] for server in (ours, theirs))
    assert (mine["logprobs"]["tokens"], other["logprobs"]["tokens"]) == (["\ufffd"] * 2, [""] * 2)
    assert mine["text"] == other["text"]


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.8},
        {"top_k": 20, "top_p": 0.6, "temperature": 0.7},
        {"min_p": 0.5, "temperature": 1.6},
        {"allowed_token_ids": [5, 6, 7]},
        {"logit_bias": {"50": 3.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_log_probs_are_those_of_what_was_sampled_from(ours: Client, theirs: Client, asked: Json) -> None:
    """A token that both may sample: the likeliest of what is left, whose log-prob tells the sum over the rest."""
    body = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 3, "temperature": 1.0, "seed": 5, **asked}
    mine, other = (server.post(PATH, body)["choices"][0]["logprobs"]["top_logprobs"][0] for server in (ours, theirs))
    first = max(other, key=lambda token: other[token])
    assert abs(mine[first] - other[first]) < TOLERANCE
