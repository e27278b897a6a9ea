"""Answers into content, reasoning and calls: whole, and as they stream."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.kit import FORMATS, spoken
from tests.tokens.models import MODELS, renderer, vocabulary

from headrace.tokens import AnswerDelta, Detokenizer, Grammar, Parsed, ToolCall, Vocabulary, text_of
from headrace.tokens.channels import parser_of
from headrace.tokens.forms import THINK, CallForm, JsonObject
from headrace.tokens.parse import AnswerParser, CallDelta
from headrace.tokens.proof import summed

IN_TAGS = CallForm(JsonObject(), open="<tool_call>\n", close="\n</tool_call>", between="\n")
IN_A_LIST = CallForm(JsonObject(id="id"), begin="[TOOL_CALLS][", between=", ", end="]")
BARE = CallForm(JsonObject(arguments="parameters"), lead="<|python_tag|>")
GRAMMARS = [Grammar(thinks, calls) for thinks in (THINK, None) for calls in (None, IN_TAGS, IN_A_LIST, BARE)]
HERMES = Grammar(THINK, IN_TAGS)
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {"a": true}}',
    '{"name": "f", "parameters": {"a": [1, "é"]}}',
    '[{"name": "f", "arguments": {}, "id": "abc123DEF"}]',
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "{",
    "}",
    "<",
    "<tool",
    "\n",
    " ",
    "\n\n",
    "word",
    "日本",
    "; ",
]


def fed(
    grammar: Grammar, pieces: list[str], *, tools: bool = True, thinking: bool = False
) -> tuple[AnswerDelta, Parsed]:
    """The sum of all deltas, and the whole."""
    parser = parser_of(grammar, tools=tools, thinking=thinking, new_id=lambda n: f"id{n}")
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return summed(deltas), parser.parsed


def expected_sum(whole: Parsed) -> AnswerDelta:
    """What the deltas of an answer add up to."""
    calls = (CallDelta(n, call.id, call.name, call.written) for n, call in enumerate(whole.tool_calls))
    return AnswerDelta(whole.content, whole.reasoning or "", tuple(calls))


def parse(grammar: Grammar, text: str, **given: Any) -> Parsed:
    return fed(grammar, [text], **given)[1]


@settings(max_examples=400)
@given(
    st.sampled_from(GRAMMARS), st.lists(st.sampled_from(PIECES), max_size=12), st.booleans(), st.booleans(), st.data()
)
def test_deltas_add_up_to_the_whole_however_the_text_is_cut(
    grammar: Grammar, pieces: list[str], tools: bool, thinking: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    thinking = thinking and grammar.reasoning is not None
    whole = parse(grammar, text, tools=tools, thinking=thinking)
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    cut = [text[a:b] for a, b in pairwise(places)]
    total, parsed = fed(grammar, cut, tools=tools, thinking=thinking)
    assert parsed == whole
    assert total == expected_sum(whole)


@given(st.sampled_from(GRAMMARS), st.text("ab <>{}[]\né", max_size=40))
def test_an_answer_without_marks_is_its_content(grammar: Grammar, text: str) -> None:
    assert parse(grammar, text, tools=False).content == text


MISTRAL, LLAMA = Grammar(None, IN_A_LIST), Grammar(None, BARE)
F, G = ToolCall("f", {}, "id0"), ToolCall("g", {}, "id1")
F_A = ToolCall("f", {"a": 1}, "id0")
NOT_JSON = '<tool_call>{"name": "f", "arguments": NaN}</tool_call>'
READ = [
    (HERMES, "hi there ", Parsed("hi there ")),
    (HERMES, "<think>\nwhy\n</think>\n\nso", Parsed("so", "why")),
    (HERMES, "<think>\n\n</think>\n\nso", Parsed("so", "")),
    (HERMES, "<think>why", Parsed("", "why", cut="reasoning")),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', Parsed("", None, (F_A,))),
    (
        HERMES,
        'Well.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
        Parsed("Well.", None, (F, G)),
    ),
    (HERMES, "<think>a<tool_call>draft</tool_call></think>b", Parsed("b", "a<tool_call>draft</tool_call>")),
    (HERMES, '<think>a<tool_call>{"name": "f"}</tool_call>', Parsed("", "a", (F,))),
    (HERMES, "x <tool_call>{", Parsed("x <tool_call>{", None, (), ("<tool_call>{",), "tool_call")),
    (
        HERMES,
        "<tool_call>{</tool_call> y",
        Parsed("<tool_call>{</tool_call> y", None, (), ("<tool_call>{</tool_call>",)),
    ),
    (HERMES, NOT_JSON, Parsed(NOT_JSON, None, (), (NOT_JSON,))),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', Parsed("", None, (F_A,))),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc123DEF"}]',
        Parsed("", None, (ToolCall("f", {"a": 1}, "abc123DEF"),)),
    ),
    (MISTRAL, "ok[TOOL_CALLS][{", Parsed("ok[TOOL_CALLS][{", None, (), ("[TOOL_CALLS][{",), "tool_call")),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', Parsed("", None, (F_A,))),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        Parsed("", None, (F, G)),
    ),
    (LLAMA, '{"name": "Bob", "age": 3}', Parsed('{"name": "Bob", "age": 3}')),
    (LLAMA, '{"a": ', Parsed('{"a": ')),
]


@pytest.mark.parametrize(("grammar", "text", "expected"), READ)
def test_answers_are_read_as_their_family_writes_them(grammar: Grammar, text: str, expected: Parsed) -> None:
    assert parse(grammar, text) == expected


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(HERMES, text, tools=False) == Parsed(text)
    assert parse(LLAMA, '{"name": "f", "parameters": {}}', tools=False).tool_calls == ()


def test_content_streams_before_the_answer_is_whole() -> None:
    parser = AnswerParser(HERMES, tools=True, new_id=str)
    assert [parser.feed(text).content for text in ("One ", "two", " <", "b> ", "<tool")] == [
        "One",
        " two",
        "",
        " <b>",
        "",
    ]


def test_a_parser_leaves_nothing_to_the_garbage_collector() -> None:
    gc.disable()
    try:
        parser = parser_of(HERMES, tools=True, thinking=False, new_id=str)
        parser.feed("One two")
        parser.finish()
        left = weakref.ref(parser)
        del parser
        assert left() is None
    finally:
        gc.enable()


ODD = st.text("ab 日🙂é\u0301\u200d👩🏽ß<>{}\n", max_size=30)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=40)
@given(ODD, st.lists(st.integers(0, 49151), max_size=12))
def test_detokenised_pieces_add_up_to_the_decoded_text(name: str, text: str, ids: list[int]) -> None:
    vocab = vocabulary(name)
    for run in (vocab.encode(text), ids):
        stream = Detokenizer(vocab)
        pieces = [stream.feed([i]) for i in run]
        assert "".join([*pieces, stream.finish()]) == text_of(vocab, run) == vocab.decode(run, skip_special=True)
        # No character was given out half: a whole text's pieces show nothing that the text does not.
        assert run is ids or not any("\ufffd" in piece for piece in pieces)


def test_a_tokenizer_that_is_not_byte_level_streams_the_same_text() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    vocab = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not vocab.bytewise
    ids = [2, 3, 4, 5, *(6 + byte for byte in " 日🙂".encode()), 2, 6 + 0xE6]
    stream = Detokenizer(vocab)
    streamed = [stream.feed([i]) for i in ids]
    assert "".join([*streamed, stream.finish()]) == vocab.decode(ids)
    assert vocab.decode(ids).startswith("the cats. 日🙂 the")
    assert not any("\ufffd" in piece for piece in streamed)


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "llama3.2", "mistral-nemo"])
def test_streamed_ids_say_what_the_whole_answer_says(name: str) -> None:
    render = renderer(name)
    calls = [ToolCall("look_up", {"q": '日本 "🙂"', "deep": True}, "abc123DEF")]
    content = "" if FORMATS[name] in ("llama", "mistral") else "Well, 🙂"
    reasoning = "why\n\nso" if name == "qwen3" else None
    ids = [*render.vocabulary.encode(spoken(FORMATS[name], content, reasoning, calls)), next(iter(render.stop_ids))]
    prompt = render.vocabulary.encode("x")
    stream = render.stream(prompt, tools=True)
    deltas = [*(stream.feed([i]) for i in ids), stream.finish()]
    whole = render.parse(prompt, ids, tools=True)
    assert stream.parsed == whole
    assert "".join(delta.content for delta in deltas) == whole.content == content
    assert "".join(delta.reasoning for delta in deltas) == (whole.reasoning or "") == (reasoning or "")
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [(calls[0].name, calls[0].arguments)]


def test_a_prompt_that_opens_the_reasoning_is_seen() -> None:
    render = renderer("qwen3")
    prompt = render.vocabulary.encode("<|im_start|>assistant\n<think>\n")
    parsed = render.parse(prompt, render.vocabulary.encode("why\n</think>\n\nso"), tools=False)
    assert parsed == Parsed("so", "why")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "Well."),
        ("qwen3", "<think>\nwhy\n</think>\n\nso"),
        ("qwen3", '<think>\nwhy\n</think>\n\nso\n<tool_call>\n{"name": "f", "arguments": {"a": true}}\n</tool_call>'),
        (
            "qwen3",
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>',
        ),
        ("qwen3", "<think>\nwhy"),
        ("llama3.2", "Well."),
        ("llama3.2", '{"name": "f", "parameters": {"a": "é"}}'),
        ("llama3.2", '{"x": 1}'),
    ],
)
def test_our_reading_agrees_with_the_librarys(name: str, text: str) -> None:
    render: Any = renderer(name)
    ids = render.vocabulary.encode(text)
    theirs = render._library.parse_response(ids)
    ours = render.parse([], ids, tools=True)
    assert ours.content.strip() == theirs.content.strip()
    assert (ours.reasoning or "").strip() == (theirs.reasoning_content or "").strip()
    assert [(c.name, c.arguments) for c in ours.tool_calls] == [(c.name, c.arguments) for c in theirs.tool_calls]
    assert (ours.cut == "reasoning") == (theirs.reasoning_complete is False)
