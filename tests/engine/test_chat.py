"""`tiny` speaks: its template keeps prefixes, renders tools, and its calls are parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.kit import Client

from headrace.engine import tiny, tokenizer
from headrace.engine.tiny import _tokenizer

TOKENIZER = _tokenizer()
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": true, "é": "ü"}'}}

WORDS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "assistant"]), "content": WORDS}),
    st.just({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": WORDS, "tool_calls": st.just([CALL, CALL])}),
)


@given(messages=st.lists(MESSAGE, min_size=2, max_size=6), cut=st.integers(1, 5), tools=st.sampled_from([None, [TOOL]]))
def test_a_longer_conversation_begins_with_the_ids_of_a_shorter_one(
    messages: list[dict[str, Any]], cut: int, tools: list[Any] | None
) -> None:
    short = tokenizer.render_chat(TOKENIZER, messages[:cut], tools, add_generation_prompt=False)
    long = tokenizer.render_chat(TOKENIZER, messages, tools, add_generation_prompt=False)
    assert long[: len(short)] == short


def test_a_sampled_answer_is_a_prefix_of_the_next_turn(engine: Client) -> None:
    first = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.render_chat(TOKENIZER, first, None, add_generation_prompt=True)
    answer = TOKENIZER.encode("higher", add_special_tokens=False)
    turns = [*first, {"role": "assistant", "content": "higher"}, {"role": "user", "content": "5"}]
    following = tokenizer.render_chat(TOKENIZER, turns, None, add_generation_prompt=True)
    assert following[: len(prompt) + len(answer) + 1] == [*prompt, *answer, TOKENIZER.eos_token_id]


def test_tools_and_their_results_are_rendered(engine: Client) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    found = engine.post("/tokenize", {"messages": messages, "tools": [TOOL]})
    text = engine.post("/detokenize", {"tokens": found["tokens"]})["prompt"]
    assert text.startswith("<|im_start|>system\nbe brief\n")
    assert text.count("be brief") == 1
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": true, "é": "ü"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")


def test_the_root_of_the_model_is_a_folder_that_transformers_loads(engine: Client) -> None:
    from transformers import AutoTokenizer

    root = engine.get("/v1/models")["data"][0]["root"]
    tokenizer = AutoTokenizer.from_pretrained(root)
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert engine.post("/tokenize", {"messages": messages})["tokens"] == ids


def test_tiny_is_built_once_and_by_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    first = tiny.folder(3)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny.folder(3) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert first.is_relative_to(tmp_path)
    assert tiny.folder(4) != first
    assert (tiny.folder(4) / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    assert {path.name for path in first.parent.iterdir()} == {first.name, tiny.folder(4).name}


A = '{"name": "a", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("plain", "plain", []),
        ('<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', None, ["a"]),
        (f"so <tool_call>{A}</tool_call><tool_call>{A}</tool_call>", "so ", ["a", "a"]),
        (f"<tool_call>{A}", None, ["a"]),
        ('<tool_call>{"name": "a"}</tool_call>', '<tool_call>{"name": "a"}</tool_call>', []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ],
)
def test_tool_calls_are_found_in_text(text: str, content: str | None, names: list[str]) -> None:
    found, calls = tokenizer.parse_tool_calls(text)
    assert (found, [call["function"]["name"] for call in calls]) == (content, names)
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_text_that_is_no_call_streams_to_the_same_text(engine: Client, tools: list[Any] | None) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, "max_tokens": 30, "seed": 5, "n": 2}
    whole = engine.post("/v1/chat/completions", body)["choices"]
    texts = ["", ""]
    for chunk in engine.chunks("/v1/chat/completions", body):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole]


def test_a_stream_holds_back_what_may_be_a_call_and_sends_it_whole() -> None:
    """Fed with the pieces of an answer, the chunks say what the whole answer says."""
    from headrace.engine.answers import ChatChunks
    from headrace.engine.requests import ChatRequest
    from headrace.engine.sequence import EngineSequence, OutputText, SamplingParams
    from headrace.engine.worker import _delta

    asked = ChatRequest(messages=[{}], tools=[TOOL])
    said = 'a < b <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = OutputText(TOKENIZER.backend_tokenizer, [1])
    sampling = SamplingParams(max_tokens=99)
    sequence = EngineSequence("r", 0, [1], sampling, seed=0, eos=frozenset([2]), text=text, stream=True)
    chunks = ChatChunks({}, asked, None)  # type: ignore[arg-type]
    deltas, reason = [], None
    for token in [*TOKENIZER.encode(said, add_special_tokens=False), 2]:
        sequence.push(token, -1.0, "v")
        choice = chunks(_delta(sequence))["choices"][0]
        deltas.append(choice["delta"])
        reason = choice["finish_reason"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "a < b "
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in calls] == [(0, {"name": "add", "arguments": '{"a": 1}'})]
    assert reason == "tool_calls"
