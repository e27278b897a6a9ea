"""Every recorded request of vLLM is answered with the same keys and types as vLLM answered it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client

SAMPLES = Path(__file__).parent / "vllm"
#: What names its keys itself: by token.
BY_TOKEN = ("top_logprobs", "prompt_logprobs")
#: Structured outputs are not offered (see test_hostile).
NOT_OFFERED = {"chat_tools_required"}


def asked(value: Any, client: Client) -> Any:
    """A sample's request for this engine: its model, its vocabulary, its folder."""
    if isinstance(value, dict):
        return {key: asked(item, client) for key, item in value.items()}
    if isinstance(value, list):
        return [asked(item, client) for item in value]
    if value in ("smollm2", "/models/tiny"):
        return "tiny" if value == "smollm2" else str(client.engine.folder)
    if type(value) is int and value < 900_000:
        return value % client.engine.vocabulary
    return value


def same_shape(found: Any, sample: Any, path: str = "") -> None:
    """The same keys in the same order and the same types, all the way down."""
    by_token = (
        path.rpartition(".")[2] in BY_TOKEN and isinstance(sample, dict) and not {"token", "token_id"} & set(sample)
    )
    if path.endswith("prompt_tokens_details"):  # null, or counts, by how the server was started
        assert found is None
    elif by_token:
        assert isinstance(found, dict), path
        for value in found.values():
            same_shape(value, next(iter(sample.values())), path + ".*")
    elif isinstance(sample, dict):
        assert isinstance(found, dict), path
        assert list(found) == list(sample), path
        for key in sample:
            same_shape(found[key], sample[key], f"{path}.{key}")
    elif isinstance(sample, list):
        assert isinstance(found, list), path
        kinds = [value for value in sample if value is not None]
        for value in found:
            assert kinds or value is None, path
            if value is not None:
                same_shape(value, kinds[0], path)
    elif path.endswith("finish_reason"):
        assert isinstance(found, str) == isinstance(sample, str), path
    else:
        assert type(found) is type(sample), f"{path}: {found!r} against {sample!r}"


@pytest.mark.parametrize("name", sorted({file.stem for file in SAMPLES.glob("*.json")} - NOT_OFFERED))
def test_an_answer_has_the_shape_of_vllms(engine: Client, name: str) -> None:
    sample = json.loads((SAMPLES / f"{name}.json").read_bytes())
    given = sample["request"]
    query = "?" + "&".join(f"{key}={value}" for key, value in given["params"].items()) if given["params"] else ""
    status, found = engine.send(given["method"], given["path"] + query, asked(given["body"], engine))
    if given["path"] == "/pause":
        engine.post("/resume")
    if given["path"] == "/update_weight_version":
        engine.post("/update_weight_version", {"new_version": "default"})
    assert status == sample["status"]
    same_shape(found, sample["response"])


@pytest.mark.parametrize("name", ["completions_stream", "chat_stream"])
def test_a_stream_has_the_chunks_of_vllms(engine: Client, name: str) -> None:
    request, _, lines = (SAMPLES / f"{name}.sse.txt").read_text().partition("\n-----\n")
    sample = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    path = "/v1/chat/completions" if name == "chat_stream" else "/v1/completions"
    # An answer that does not end early, and in which every token is a letter: no chunk is without text.
    letters = {"ignore_eos": True, "allowed_token_ids": [67, 68, 69]}
    found = engine.chunks(path, {**asked(json.loads(request), engine), **letters})
    assert len(found) == len(sample)
    for ours, theirs in zip(found, sample, strict=True):
        same_shape(ours, theirs)


@pytest.mark.parametrize(
    "name", ["chat_bad_field", "chat_bad_model", "completions_vocab_oob", "completions_ctx_overflow"]
)
def test_an_error_has_the_words_of_vllms(engine: Client, name: str) -> None:
    sample = json.loads((SAMPLES / f"{name}.json").read_bytes())
    assert engine.send("POST", sample["request"]["path"], asked(sample["request"]["body"], engine)) == (
        sample["status"],
        sample["response"],
    )


def test_an_answer_that_ends_with_eos_holds_it_among_its_ids_and_not_in_its_text(engine: Client) -> None:
    sample = json.loads((SAMPLES / "completions_stop_eos.json").read_bytes())
    found = engine.post("/v1/completions", asked(sample["request"]["body"], engine))["choices"][0]
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("", [2], "stop")
    assert found["stop_reason"] is None
    assert len(found["logprobs"]["token_logprobs"]) == 1
    assert found["logprobs"]["tokens"] == ["<|im_end|>"]


def test_token_strings_become_ids_where_that_is_asked_for(engine: Client) -> None:
    found = engine.complete([1, 5, 9], max_tokens=2, seed=1, return_tokens_as_token_ids=True)
    names = [f"token_id:{token}" for token in found["token_ids"]]
    assert found["logprobs"]["tokens"] == names
    assert found["logprobs"]["text_offset"] == [0, len(names[0])]


def test_the_sampled_token_comes_first_and_the_likeliest_after_it(engine: Client) -> None:
    found = engine.complete([1, 5, 9], max_tokens=3, seed=1, logprobs=2, return_tokens_as_token_ids=True)
    for token, top in zip(found["token_ids"], found["logprobs"]["top_logprobs"], strict=True):
        assert next(iter(top)) == f"token_id:{token}"
        rest = list(top.values())[1:]
        assert rest == sorted(rest, reverse=True)
        assert 2 <= len(top) <= 3
