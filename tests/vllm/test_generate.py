"""`/inference/v1/generate` of Headrace's engine answers as vLLM's does."""

from __future__ import annotations

import pytest
from tests.engine.kit import Client, Json
from tests.vllm.kit import PROMPT, TRIES, agree, both, stream_alike, tell_alike

PATH = "/inference/v1/generate"

REQUESTS: dict[str, Json] = {
    "ids": {},
    "log-probs": {"logprobs": 1},
    "log-probs of the sampled alone": {"logprobs": 0},
    "three log-probs": {"logprobs": 3, "allowed_token_ids": [67, 68, 69]},
    "log-probs of the prompt": {"prompt_logprobs": 1},
    "a stop token": {"stop_token_ids": [364]},
    "a stop string": {"stop": ["</tool_"]},
    "a stop string by itself": {"stop": "</tool_"},
    "a stop string that is told": {"stop": ["</tool_"], "include_stop_str_in_output": True},
    "EOS": {"logit_bias": {"2": 100}, "logprobs": 1},
    "EOS ignored": {"logit_bias": {"2": 100}, "ignore_eos": True, "max_tokens": 3},
    "half a character": {"allowed_token_ids": [129], "max_tokens": 2},
    "parameters that are off": {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": None, "repetition_penalty": 1.0},
}


def body(mode: str, **sampling: object) -> Json:
    params = {"temperature": 0, "max_tokens": 8, **sampling}
    return {"model": "tiny", "token_ids": PROMPT, "output_mode": mode, "sampling_params": params}


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_whole_answer_is_vllms(ours: Client, theirs: Client, name: str, mode: str) -> None:
    both(ours, theirs, PATH, {**body(mode, **REQUESTS[name]), "return_token_ids": True})


@pytest.mark.parametrize("name", sorted(set(REQUESTS) - {"log-probs of the prompt"}))
def test_a_streamed_answer_tells_the_same_text_after_as_many_tokens(ours: Client, theirs: Client, name: str) -> None:
    asked = body("text", **REQUESTS[name])
    tell_alike(ours.chunks(PATH, asked), theirs.chunks(PATH, asked))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"output_mode": "text"},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_a_streams_chunks_have_the_shapes_of_vllms(ours: Client, theirs: Client, asked: Json) -> None:
    given = {**body("tokens", logprobs=1), **asked}
    stream_alike(ours, theirs, PATH, given)


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_a_streams_choices_are_vllms_to_the_last(ours: Client, theirs: Client, mode: str) -> None:
    """One token a chunk, or several where a server was kept from sending: then both are asked again."""
    given = body(mode, logprobs=1)
    for left in reversed(range(TRIES)):
        mine, other = (
            [chunk["choices"] for chunk in server.chunks(PATH, given) if chunk["choices"]] for server in (ours, theirs)
        )
        if _sizes(mine) == _sizes(other) or not left:
            break
    agree(mine, other)


def _sizes(chunks: list[list[Json]]) -> list[list[int]]:
    """Of each chunk, how many log-probs each choice in it tells."""
    return [[len(choice["logprobs"]["content"]) for choice in choices] for choices in chunks]


def test_an_answer_without_a_length_goes_on_to_the_end_of_the_context(ours: Client, theirs: Client) -> None:
    for server in (ours, theirs):
        given = {"token_ids": [67] * 2040, "sampling_params": {"temperature": 0, "ignore_eos": True}}
        assert len(server.post(PATH, given)["choices"][0]["token_ids"]) == 8


def test_n_answers_count_the_prompt_once(ours: Client, theirs: Client) -> None:
    given = body("tokens", temperature=1, n=3, ignore_eos=True)
    mine, other = ours.post(PATH, given), theirs.post(PATH, given)
    agree(mine["usage"], other["usage"])
    assert sorted(choice["index"] for choice in mine["choices"]) == [0, 1, 2]
    assert sorted(choice["index"] for choice in other["choices"]) == [0, 1, 2]
