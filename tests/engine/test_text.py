"""Text is what the ids say, however it comes; stop strings end it wherever they fall."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.engine.kit import Client

from headrace.engine.sequence import EngineSequence, OutputText, SamplingParams
from headrace.engine.tiny import _tokenizer
from headrace.engine.tokenizer import EngineTokenizer

INNER = _tokenizer().backend_tokenizer
PROMPT = [1, 50, 60, 70]


@given(ids=st.lists(st.integers(0, 364), max_size=40))
def test_ids_taken_one_by_one_give_the_text_of_ids_taken_at_once(ids: list[int]) -> None:
    slow, fast = OutputText(INNER, PROMPT), OutputText(INNER, PROMPT)
    for end in range(1, len(ids) + 1):
        slow.take(ids[:end])
    fast.take(ids)
    assert slow.value == fast.value


@given(text=st.text(max_size=30))
def test_ids_of_a_text_give_that_text(text: str) -> None:
    found = OutputText(INNER, [])
    for end in range(1, len(ids := INNER.encode(text).ids) + 1):
        found.take(ids[:end])
    assume(not any(mark in text for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")))  # these are not text
    # What looks like a byte that is no character is held back at the end.
    assert found.value == text or text.endswith("\ufffd")


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    ids = INNER.encode("€").ids
    assert len(ids) == 3
    found = OutputText(INNER, PROMPT)
    seen = []
    for end in range(1, 4):
        found.take(ids[:end])
        seen.append(found.value)
    assert seen == ["", "", "€"]


def answer(vocabulary: EngineTokenizer, text: str, stop: tuple[str, ...], **asked: object) -> EngineSequence:
    """An answer whose tokens are those of a text, as far as it gets."""
    sampling = SamplingParams(max_tokens=99, stop=stop, **asked)  # type: ignore[arg-type]
    sequence = EngineSequence("r", 0, [1], sampling, seed=0, eos=frozenset([2]), text=OutputText(vocabulary.inner, [1]))
    for token in vocabulary.inner.encode(text).ids:
        if sequence.finish_reason is None:
            sequence.push(token, -1.0, "v")
    return sequence


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> EngineTokenizer:
    return EngineTokenizer(folder)


def test_a_stop_string_across_tokens_ends_the_answer_before_it(vocabulary: EngineTokenizer) -> None:
    text = "the number is 42! and more"
    pieces = [vocabulary.text(token) for token in vocabulary.inner.encode("s 42!").ids]
    assert len(pieces) > 2
    found = answer(vocabulary, text, ("zzz", "s 42!"))
    assert (found.text.value, found.finish_reason, found.stop_reason) == ("the number i", "stop", "s 42!")
    assert vocabulary.decode(found.output).startswith("the number is 42!")


def test_a_stop_string_may_be_kept(vocabulary: EngineTokenizer) -> None:
    found = answer(vocabulary, "one, two, three", (", t",), include_stop_str_in_output=True)
    assert found.text.value == "one, t"


def test_a_stop_string_before_the_least_length_does_not_count(vocabulary: EngineTokenizer) -> None:
    found = answer(vocabulary, "a.b.c.d.e.f", (".",), min_tokens=4)
    assert found.text.value == "a.b.c"
    assert len(found.output) == 6


def test_a_stop_token_ends_the_answer_and_is_named(vocabulary: EngineTokenizer) -> None:
    token = vocabulary.inner.encode("!").ids[0]
    found = answer(vocabulary, "yes! no", (), stop_token_ids=frozenset([token]))
    assert (found.text.value, found.stop_reason, found.output[-1]) == ("yes", token, token)


def test_a_stop_string_of_an_answer_cuts_its_text_and_keeps_its_ids(engine: Client) -> None:
    whole = engine.complete(PROMPT, max_tokens=40, seed=8, ignore_eos=True)
    stop = whole["text"][10:13]
    cut = engine.complete(PROMPT, max_tokens=40, seed=8, ignore_eos=True, stop=["never", stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["logprobs"]["token_logprobs"]) == len(cut["token_ids"])


@pytest.mark.parametrize("stop", [None, [" a", "o"], ["\n", "er"]])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_adds_up_to_the_answer(engine: Client, seed: int, stop: list[str] | None) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 40, "seed": seed, "logprobs": 1, "return_token_ids": True, "stop": stop}
    whole = engine.post("/v1/completions", asked)["choices"][0]
    parts = [chunk["choices"][0] for chunk in engine.chunks("/v1/completions", asked)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part["logprobs"][key]] == whole["logprobs"][key]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert parts[-1]["stop_reason"] == whole["stop_reason"]
    assert [part["prompt_token_ids"] for part in parts] == [PROMPT] + [None] * (len(parts) - 1)


def test_a_stream_of_several_choices_and_prompts_tells_them_apart(engine: Client) -> None:
    asked = {"prompt": [PROMPT, [1, 2, 3]], "n": 2, "max_tokens": 6, "seed": 1, "return_token_ids": True}
    whole = engine.post("/v1/completions", asked)["choices"]
    parts = engine.chunks("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    assert parts[-1]["usage"]["prompt_tokens"] == len(PROMPT) + 3
    ids: dict[int, list[int]] = {}
    for part in parts[:-1]:
        ids.setdefault(part["choices"][0]["index"], []).extend(part["choices"][0]["token_ids"])
    assert ids == {choice["index"]: choice["token_ids"] for choice in whole}


def test_generates_stream_adds_up_to_its_answer(engine: Client) -> None:
    asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 7, "seed": 4, "logprobs": 1}, "output_mode": "text"}
    whole = engine.post("/inference/v1/generate", asked)["choices"][0]
    parts = [part["choices"][0] for part in engine.chunks("/inference/v1/generate", asked)]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["weight_versions"] == whole["weight_versions"]
    assert [entry for part in parts for entry in part["logprobs"]["content"]] == whole["logprobs"]["content"]
