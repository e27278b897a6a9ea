"""Corners of vLLM's wire that no recorded sample shows; `tests/vllm` holds them to the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client, serving

GENERATE = "/inference/v1/generate"
LETTERS: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": [67, 68], "ignore_eos": True}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **LETTERS, **fields}


@pytest.mark.parametrize("asked", [9, 2048, None])
def test_an_answer_is_no_longer_than_the_room_that_is_left(engine: Client, asked: int | None) -> None:
    found = engine.complete([5] * 2040, max_tokens=asked, ignore_eos=True)
    assert (len(found["token_ids"]), found["finish_reason"]) == (8, "length")


def test_a_streams_last_chunk_is_signed(engine: Client) -> None:
    chunks = engine.chunks("/v1/chat/completions", chat())
    assert ["system_fingerprint" in chunk for chunk in chunks] == [False, False, False, True]


def test_the_usage_is_signed_instead_where_it_comes_last(engine: Client) -> None:
    chunks = engine.chunks("/v1/completions", {"prompt": [5], **LETTERS, "stream_options": {"include_usage": True}})
    assert ["system_fingerprint" in chunk for chunk in chunks] == [False, False, False, True]
    assert chunks[-1]["choices"] == []


def test_a_chunk_without_text_has_an_empty_delta(engine: Client) -> None:
    half = engine.chunks("/v1/chat/completions", chat(allowed_token_ids=[129], max_tokens=1))[-1]
    assert half["choices"][0]["delta"] == {}


def test_a_stream_of_ids_tells_the_prompt_once(engine: Client) -> None:
    given = {"token_ids": [5, 6], "return_token_ids": True, "sampling_params": {**LETTERS, "temperature": 1, "n": 2}}
    first, *rest = engine.chunks(GENERATE, given)
    assert first["prompt_token_ids"] == [5, 6]
    assert list(first) == ["request_id", "usage", "prompt_token_ids", "output_mode", "choices"]
    assert all(list(chunk) == ["request_id", "usage", "output_mode", "choices"] for chunk in rest)


def test_log_probs_beside_text_tell_strings(engine: Client) -> None:
    given = {"token_ids": [5], "output_mode": "text", "sampling_params": {**LETTERS, "max_tokens": 1, "logprobs": 0}}
    choice = engine.post(GENERATE, given)["choices"][0]
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"]) == (choice["text"], list(choice["text"].encode()))
    assert entry["top_logprobs"] == [{name: entry[name] for name in ("token", "logprob", "bytes")}]


def test_text_parts_are_lines(engine: Client) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = [
        engine.post("/tokenize", {"messages": [{"role": "user", "content": content}]})["tokens"]
        for content in (parts, "a\nb")
    ]
    assert found[0] == found[1]


def test_an_answer_that_goes_on_with_a_message_has_its_role(engine: Client) -> None:
    found = engine.post("/v1/chat/completions", chat(add_generation_prompt=False))
    assert found["choices"][0]["message"]["role"] == "user"


def test_a_models_defaults_count_for_openais_routes_and_not_for_generate(folder: Path, tmp_path: Path) -> None:
    greedy = tmp_path / "greedy"
    shutil.copytree(folder, greedy)
    generation = json.loads((greedy / "generation_config.json").read_text())
    (greedy / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.0}))
    with serving(model=str(greedy), logprobs_mode="processed_logprobs") as own:
        prompt = [1, 50, 60]
        likeliest = own.complete(prompt, temperature=0, max_tokens=8)["token_ids"]
        assert own.complete(prompt, max_tokens=8, seed=1)["token_ids"] == likeliest
        sampled = own.post(GENERATE, {"token_ids": prompt, "sampling_params": {"max_tokens": 8, "seed": 1}})
        assert sampled["choices"][0]["token_ids"] != likeliest


# -- /generate, as Atropos' vLLM server has it -------------------------------------------------------------------------


def test_atropos_generate_tells_what_the_other_routes_do(engine: Client) -> None:
    sampling = {"n": 2, "seed": 3, "max_tokens": 4, "logprobs": 2, "temperature": 1.0, "ignore_eos": True}
    found = engine.post("/generate", {"prompt": {"prompt_token_ids": [5, 6]}, **sampling})
    assert list(found) == ["text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"]
    told = engine.post("/v1/completions", {"prompt": [5, 6], "return_token_ids": True, **sampling})["choices"]
    assert found["text"] == [choice["text"] for choice in told]
    assert found["token_ids"] == [choice["token_ids"] for choice in told]
    assert found["finish_reasons"] == ["length", "length"]
    assert found["prompt_token_ids"] == [5, 6]
    assert found["prompt"] == engine.post("/detokenize", {"tokens": [5, 6]})["prompt"]
    for rows, choice in zip(found["logprobs"], told, strict=True):
        assert [len(row) for row in rows] == [1] * 4
        sampled = [next(iter(row[0].items())) for row in rows]
        assert [int(token) for token, _ in sampled] == choice["token_ids"]
        assert [value for _, value in sampled] == choice["logprobs"]["token_logprobs"]
        assert all(len(row[0]) in (2, 3) for row in rows), "the sampled one, and two that are likeliest"


def test_atropos_generate_without_log_probs_tells_text(engine: Client) -> None:
    found = engine.post("/generate", {"prompt": "Once", "temperature": 0, "ignore_eos": True})
    assert (list(found), found["prompt"]) == (["text", "prompt", "finish_reasons"], "Once")
    assert found["text"] == [engine.complete("Once", temperature=0, ignore_eos=True, max_tokens=16)["text"]]


def test_atropos_generate_tells_the_log_probs_of_a_prompt(engine: Client) -> None:
    found = engine.post("/generate", {"prompt": {"prompt_token_ids": [5, 6, 7]}, "prompt_logprobs": 2, "max_tokens": 1})
    told = engine.complete([5, 6, 7], prompt_logprobs=2, max_tokens=1)["prompt_logprobs"]
    assert found["prompt_logprobs"][0] is told[0] is None
    for ours, theirs in zip(found["prompt_logprobs"][1:], told[1:], strict=True):
        assert list(ours.items()) == [(token, entry["logprob"]) for token, entry in theirs.items()]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": [5, 6]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": {"prompt_token_ids": []}}, "empty"),
        ({"prompt": {"prompt_token_ids": [10**6]}}, "out of vocabulary"),
        ({"prompt": "x", "stream": True}, "does not stream"),
        ({"prompt": "x", "temperature": None}, "temperature"),
        ({"prompt": "x", "bad_words": ["y"]}, "bad_words"),
    ],
)
def test_atropos_generate_names_what_it_does_not_take(engine: Client, given: dict[str, Any], said: str) -> None:
    status, error = engine.refused("/generate", given)
    assert status == 400
    assert said in error["message"]
