"""Forms of calls: what a form writes is read back, however it is cut, and hostile text never breaks the rules."""

from __future__ import annotations

import copy
import json
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import examples
from tests.tokens.test_bridges import bytes_vocabulary

from headrace.tokens import AnswerDelta, CallDelta, CallForm, Grammar, Parsed, ToolCall, Vocabulary
from headrace.tokens.channels import parser_of
from headrace.tokens.declared import DECLARED
from headrace.tokens.forms import (
    THINK,
    Channels,
    JsonObject,
    KeyValues,
    NamedArguments,
    Parameters,
    PythonCall,
)
from headrace.tokens.jsontext import JsonScanner, is_json
from headrace.tokens.proof import summed
from headrace.tokens.renderer import GrammarStream, default_call_id

FORMS = {
    "tags": CallForm(JsonObject(), open="<tool_call>\n", close="\n</tool_call>", between="\n"),
    "list": CallForm(JsonObject(id="id"), begin="[TOOL_CALLS][", end="]", between=", "),
    "bare": CallForm(JsonObject(arguments="parameters"), between="; ", lead="<|python_tag|>"),
    "lines": CallForm(JsonObject(), begin="<tool_calls>\n", end="\n</tool_calls>", between="\n"),
    "within": CallForm(JsonObject(id="id", within="function"), open="<call>", close="</call>"),
    "name as key": CallForm(JsonObject(""), begin="<|tools_prefix|>[", end="]<|tools_suffix|>", between=", "),
    "named": CallForm(NamedArguments("[ARGS]"), open="[TOOL_CALLS]"),
    "named with id": CallForm(NamedArguments("[CALL_ID]", "[ARGS]", "{id}"), open="[TOOL_CALLS]"),
    "named in attribute": CallForm(NamedArguments(">"), open="<function=", close="</function>"),
    "fenced": CallForm(
        NamedArguments("\n```json\n"),
        begin="<calls>",
        end="</calls>",
        open="<call>function<sep>",
        close="\n```</call>",
        between="\n",
    ),
    "numbered": CallForm(
        NamedArguments(":", "<args>", "functions.{name}:{id}"),
        begin="<all>",
        end="</all>",
        open="<c>functions.",
        close="</c>",
    ),
    "parameters": CallForm(
        Parameters(">\n", "<parameter=", ">\n", "\n</parameter>", "\n"),
        open="<tool_call>\n<function=",
        close="\n</function>\n</tool_call>",
        between="\n",
    ),
    "pairs": CallForm(
        Parameters("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
        open="<tool_call>",
        close="\n</tool_call>",
        between="\n",
    ),
    "marked": next(item.grammar.calls for item in DECLARED if item.name == "dsml"),
    "python": CallForm(PythonCall(), begin="<|tool_call_start|>[", end="]<|tool_call_end|>", between=", "),
    "key values": CallForm(KeyValues('<|"|>'), open="<|tool_call>call:", close="<tool_call|>"),
    "channels": CallForm(Channels()),
    **{item.name: item.grammar.calls for item in DECLARED},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "properties": {"s": {"type": "string"}, "t": {"type": "string"}, "v": {}, "n": {"type": "number"}}
            },
        },
    }
    for name in ("f", "look_up")
]
#: Text that holds no mark of any form: where values stand as they are, they cannot hold what ends them.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12)
ATOMS = st.none() | st.booleans() | st.integers(-99, 10**20) | st.floats(allow_nan=False, allow_infinity=False)
INNER = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
NESTED = st.lists(INNER | WORDS, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_2"]), INNER | WORDS, max_size=2)
ARGUMENTS = st.fixed_dictionaries({}, optional={"s": WORDS, "t": WORDS, "v": ATOMS | NESTED, "n": st.integers()})
CALLS = st.lists(st.tuples(st.sampled_from(["f", "look_up"]), ARGUMENTS), min_size=1, max_size=3)


def read(form: CallForm, pieces: list[str], **given: Any) -> tuple[AnswerDelta, Parsed]:
    parser = parser_of(
        Grammar(THINK, form), tools=given.get("tools", TOOLS), thinking=False, new_id=lambda number: f"id{number}"
    )
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return summed(deltas), parser.parsed


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    return [text[a:b] for a, b in pairwise(places)]


def expected_sum(whole: Parsed) -> AnswerDelta:
    calls = (CallDelta(n, call.id, call.name, call.written) for n, call in enumerate(whole.tool_calls))
    return AnswerDelta(whole.content, whole.reasoning or "", tuple(calls))


@pytest.mark.parametrize("name", FORMS)
@examples(20)
@given(CALLS, st.sampled_from(["", "Let me see."]), st.data())
def test_what_a_form_writes_is_read_back(
    name: str, made: list[tuple[str, dict[str, Any]]], content: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    content = "" if form.bare or isinstance(form.body, Channels) else content
    calls = [ToolCall(called, arguments, f"id{n}") for n, (called, arguments) in enumerate(made)]
    text = content + form.written(calls)
    total, parsed = read(form, cut(text, data))
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [(c.name, c.arguments) for c in calls]
    assert parsed.content == content
    assert (parsed.malformed, parsed.cut) == ((), "")
    assert all(json.loads(call.written) == call.arguments for call in parsed.tool_calls)
    assert total == expected_sum(parsed)


def broken_text(form: CallForm) -> st.SearchStrategy[str]:
    """Text made of a form's own marks, halves of them, and what may stand between."""
    marks = [*form.literals, form.written([ToolCall("f", {"s": "x", "v": [1]})])]
    halves = [mark[: len(mark) // 2] for mark in marks]
    rest = ['{"name": "f", "arguments": {"s": "', '"}', "}", "{", '"', "f", "look_up", "\n", " ", ",", "["]
    rest += ["\\", "\\ud83d", "NaN", "1e999", "é"]
    return st.lists(st.sampled_from([*marks, *halves, *rest]), max_size=12).map("".join)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("name as key", '<|tools_prefix|>[{"f": "x", "g": {"s": "'),
        ("tags", '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>'),
        ("list", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789", "id": "987654321"}]'),
    ],
)
def test_what_a_call_was_said_to_be_it_is_though_the_text_says_another_thing_later(name: str, text: str) -> None:
    form = FORMS[name]
    whole = read(form, [text])
    assert whole[0].tool_calls
    for at in range(len(text)):
        assert read(form, [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("name", FORMS)
@examples(25)
@given(st.data())
def test_hostile_text_gives_the_same_however_it_is_cut_and_only_beginnings_of_json(
    name: str, data: st.DataObject
) -> None:
    form = FORMS[name]
    text = data.draw(broken_text(form))
    whole = read(form, [text])
    total, parsed = read(form, cut(text, data))
    assert (total, parsed) == whole
    assert total == expected_sum(parsed)
    for call in parsed.tool_calls:
        assert call.name
        scanner = JsonScanner()
        scanner.feed(call.written)
        assert not scanner.broken
        assert not call.whole or is_json(call.written)
    assert read(form, [text], tools=False)[1].tool_calls == ()


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_that_ends_anywhere_keeps_what_was_valid(name: str) -> None:
    form = FORMS[name]
    call = ToolCall("look_up", {"s": 'a "b"\n日', "v": {"a": [1.5, None]}}, "abc")
    text = form.written([call])
    for end in range(len(text)):
        parsed = read(form, [text[:end]])[1]
        assert len(parsed.tool_calls) <= 1
        for found in parsed.tool_calls:
            assert found.name == "look_up"
            assert found.whole or parsed.cut == "tool_call"
            assert found.whole or parsed.malformed
            assert not found.whole or found.arguments == call.arguments


def test_arguments_are_handed_out_as_they_come() -> None:
    parser = parser_of(Grammar(None, FORMS["tags"]), tools=True, thinking=False, new_id=str)
    pieces = ['<tool_call>{"name": "f", "argu', 'ments": {"a": "on', 'e"}}</tool_call>']
    deltas = [parser.feed(piece) for piece in pieces]
    assert [delta.tool_calls for delta in deltas] == [
        (),
        (CallDelta(0, "0", "f", '{"a": "on'),),
        (CallDelta(0, "", "", 'e"}'),),
    ]


def test_a_parameter_that_is_a_string_is_handed_out_as_it_comes() -> None:
    parser = parser_of(Grammar(None, FORMS["parameters"]), tools=TOOLS, thinking=False, new_id=str)
    pieces = ["<tool_call>\n<function=f>\n<parameter=s>\n12", ' "x"', "\n</parameter>\n</function>\n</tool_call>"]
    deltas = [parser.feed(piece) for piece in pieces]
    assert [call.arguments for delta in deltas for call in delta.tool_calls] == ['{"s": "12', ' \\"x\\"', '"}']


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        ("12", {"v": 12}),
        ("True", {"v": True}),
        ('{"a": [1]}', {"v": {"a": [1]}}),
        ("words", {"v": "words"}),
        ('"quoted"', {"v": '"quoted"'}),
        ("NaN", {"v": "NaN"}),
        ("", {"v": ""}),
    ],
)
def test_a_value_of_a_type_that_nobody_names_is_json_where_it_can_be(value: str, arguments: dict[str, Any]) -> None:
    text = FORMS["parameters"].written([ToolCall("f", {"v": value})])
    assert read(FORMS["parameters"], [text])[1].tool_calls[0].arguments == arguments


@pytest.mark.parametrize(
    ("schema", "value", "read_as"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"type": "array"}, "['x', True]", ["x", True]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "boolean"}, "maybe", "maybe"),
    ],
)
def test_a_tools_schema_says_what_a_parameter_is(schema: dict[str, Any], value: str, read_as: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    text = FORMS["parameters"].written([ToolCall("f", {"x": value})])
    assert read(FORMS["parameters"], [text], tools=tools)[1].tool_calls[0].arguments == {"x": read_as}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tags", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> so', ('{"a": ', "so")),
        ("tags", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d!"}}</tool_call>', ('{"a": "', "")),
        ("tags", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', ('{"a": ', "")),
        ("named", '[TOOL_CALLS]f[ARGS]{"a": tru', ('{"a": ', "")),
        ("fenced", '<calls><call>function<sep>f\n```json\n{"a" 1}\n```</call></calls>', ('{"a" ', "")),
    ],
)
def test_a_call_whose_arguments_leave_json_keeps_what_was_valid(
    name: str, text: str, expected: tuple[str, str]
) -> None:
    parsed = read(FORMS[name], [text])[1]
    (call,) = parsed.tool_calls
    assert (call.arguments, parsed.content) == expected
    assert not call.whole
    assert len(parsed.malformed) == 1
    assert parsed.malformed[0] in text


def test_what_comes_before_the_arguments_decides_whether_it_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": oh}</tool_call>'
    assert read(FORMS["tags"], [text])[1] == Parsed(text, None, (), (text,))


def test_white_space_that_a_model_leaves_out_or_adds_makes_no_difference() -> None:
    tight = "<tool_call><function=f><parameter=n>3</parameter></function></tool_call>"
    loose = "<tool_call>\n\n<function=f>\n\n <parameter=n>\n3\n</parameter>\n\n</function>\n </tool_call>\n"
    for text in (tight, loose):
        assert read(FORMS["parameters"], [text])[1] == Parsed("", None, (ToolCall("f", {"n": 3}, "id0"),))


def test_an_id_that_stands_after_the_arguments_is_told_with_the_name() -> None:
    total, parsed = read(FORMS["list"], list('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc123DEF"}]'))
    assert total.tool_calls == (CallDelta(0, "abc123DEF", "f", '{"a": 1}'),)
    assert parsed.tool_calls == (ToolCall("f", {"a": 1}, "abc123DEF"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            Parsed("", "I must add.", (ToolCall("f", {"a": 1}, "id0"),)),
        ),
        (
            ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}',
            Parsed("", None, (ToolCall("f", {"a": 1}, "id0"),)),
        ),
        ("<|channel|>final<|message|>So.<|return|>", Parsed("So.")),
        ("<|channel|>analysis<|message|>Why", Parsed("", "Why", cut="reasoning")),
        ("Just text.", Parsed("Just text.")),
    ],
)
def test_answers_in_channels(text: str, expected: Parsed) -> None:
    assert read(FORMS["channels"], list(text))[1] == read(FORMS["channels"], [text])[1] == expected


@cache
def channel_vocabulary() -> Vocabulary:
    """Bytes, and the marks of channels, two of which end a turn."""
    form = Channels()
    marks = (form.start, form.channel, form.message, form.constrain, form.end, form.call, form.last)
    hf = copy.deepcopy(bytes_vocabulary().hf)
    hf.add_special_tokens({"additional_special_tokens": list(marks)})
    return Vocabulary(hf)


TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F_BEGUN = (ToolCall("f", '{"a": "x"', "call_0"),)


@pytest.mark.parametrize("stop", [(), ("<|call|>", "call", "turn", "|>x")], ids=["", "stop strings"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TO_F + "<|call|>", Parsed("", None, (ToolCall("f", {}, "call_0"),))),
        (TO_F + " \n<|call|>", Parsed("", None, (ToolCall("f", {}, "call_0"),))),
        (TO_F + "{}<|call|>", Parsed("", None, (ToolCall("f", {}, "call_0"),))),
        (TO_F, Parsed(TO_F, None, (), (TO_F,), "tool_call")),
        (TO_F + '{"a": "x"<|call|>', Parsed("", None, F_BEGUN, (TO_F + '{"a": "x"',))),
        (TO_F + '{"a": "x"', Parsed("", None, F_BEGUN, (TO_F + '{"a": "x"',), "tool_call")),
        ("<|channel|>commentary to=functions.f<|call|>", Parsed("<|channel|>commentary to=functions.f")),
        ("<|channel|>final<|message|>So.<|return|>", Parsed("So.")),
        ("<|channel|>final<|message|>So.<|call|>", Parsed("So.")),
        ("<|channel|>analysis<|message|>Why<|return|>", Parsed("", "Why", cut="reasoning")),
        ("<|call|>", Parsed()),
    ],
)
def test_a_call_is_cut_where_the_token_that_ends_one_was_not_sampled(
    text: str, expected: Parsed, stop: tuple[str, ...]
) -> None:
    vocabulary, form = channel_vocabulary(), Channels()
    ids = vocabulary.encode(text)
    ends = frozenset(found for mark in (form.call, form.last) if (found := vocabulary.id_of(mark)) is not None)
    assert len(ends) == 2
    for pieces in ([ids], [[token] for token in ids]):
        grammar = Grammar(None, FORMS["channels"])
        stream = GrammarStream(vocabulary, grammar, ends, [], tools=True, new_id=default_call_id, stop=stop)
        total = summed([*(stream.feed(piece) for piece in pieces), stream.finish()])
        assert stream.parsed == expected
        assert total == expected_sum(stream.parsed)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_data(name: str) -> None:
    grammar = Grammar(THINK, FORMS[name])
    assert msgspec.json.decode(msgspec.json.encode(grammar), type=Grammar) == grammar
    assert set(FORMS[name].literals) <= set(grammar.markers)


VALUES = st.recursive(ATOMS | st.text(max_size=8), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(VALUES, st.data())
def test_all_json_is_json(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    scanner = JsonScanner()
    for piece in cut(text, data):
        assert scanner.feed(piece) == len(piece)
    scanner.finish()
    assert scanner.done
    assert "".join(scanner.pieces) == text
