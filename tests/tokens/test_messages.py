"""When two messages are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.tokens import Message, ToolCall, read_message, read_messages
from headrace.tokens.conversation import DigestChain, digest_of

USER = {"role": "user", "content": "hi"}


def call(arguments: Any, call_id: str = "call_1", name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def key(*messages: dict[str, Any]) -> bytes:
    return DigestChain(read_messages(list(messages))).whole


SAID = {"role": "assistant", "content": None, "tool_calls": [call('{"a": true, "b": [1, "é"]}')]}


@pytest.mark.parametrize(
    "other",
    [
        {"tool_calls": SAID["tool_calls"], "role": "assistant"},
        {**SAID, "content": ""},
        {**SAID, "content": " \n"},
        {**SAID, "content": []},
        {**SAID, "refusal": None, "audio": None, "function_call": None},
        {**SAID, "tool_calls": [call({"b": [1, "é"], "a": True})]},
        {**SAID, "tool_calls": [call('{"b":[1.0,"\\u00e9"],\n "a":true}')]},
        {**SAID, "tool_calls": [call('{"a": true, "b": [1, "é"]}', "toolu_9")]},
        {**SAID, "reasoning_content": "because"},
        {**SAID, "content": "<think>because</think>"},
        {**SAID, "content": [{"type": "thinking", "thinking": "because"}]},
    ],
)
def test_an_answer_is_the_same_however_it_was_reserialised(other: dict[str, Any]) -> None:
    assert key(USER, other) == key(USER, SAID)


@pytest.mark.parametrize(
    "other",
    [
        {**SAID, "content": "x"},
        {**SAID, "tool_calls": [call('{"a": false, "b": [1, "é"]}')]},
        {**SAID, "tool_calls": [call('{"a": 1, "b": [1, "é"]}')]},
        {**SAID, "tool_calls": [call('{"a": true, "b": [1, "é"]}', name="g")]},
        {**SAID, "tool_calls": SAID["tool_calls"] * 2},  # type: ignore[operator]
        {"role": "assistant", "content": ""},
        {**SAID, "role": "user"},
    ],
)
def test_an_answer_with_another_meaning_is_another(other: dict[str, Any]) -> None:
    assert key(USER, other) != key(USER, SAID)


@pytest.mark.parametrize(
    ("sampled", "as_javascript_sends_it"),
    [
        ("9007199254740993", "9007199254740992"),
        ("[1234567890123456789]", "[1234567890123456800]"),
        ("-18446744073709551617", "-18446744073709552000"),
        ("1000000000000000000000001", "1e+24"),
        ("1e16", "10000000000000000"),
        ("1e400", "null"),
        ("1" + "0" * 400, "null"),
    ],
)
def test_numbers_are_the_same_if_javascript_cannot_tell_them_apart(sampled: str, as_javascript_sends_it: str) -> None:
    assert key(USER, made(sampled)) == key(USER, made(as_javascript_sends_it))


def test_other_numbers_are_others() -> None:
    numbers = ["9007199254740992", "9007199254740994", "9007199254740991", "1e16", "true", "1", "0.1", "null"]
    assert len({key(USER, made(number)) for number in numbers}) == len(numbers)


def made(value: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call(f'{{"id": {value}}}')]}


def test_what_others_wrote_is_the_same_only_if_its_text_is() -> None:
    assert key({"role": "user", "content": "hi "}) != key(USER)
    assert key({"role": "system", "content": "hi"}) != key(USER)
    assert key({"role": "user", "content": [{"type": "text", "text": "hi"}]}) == key(USER)
    assert key({"role": "developer", "content": "hi"}) == key({"role": "system", "content": "hi"})


def test_ids_that_were_renamed_everywhere_are_the_same() -> None:
    def talk(one: str, two: str, first: str, second: str) -> bytes:
        made = [call("{}", one), call("{}", two)]
        results = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in ((first, "1"), (second, "2"))]
        return key(USER, {"role": "assistant", "tool_calls": made}, *results)

    assert talk("a", "b", "a", "b") == talk("x", "y", "x", "y")
    assert talk("a", "b", "a", "b") != talk("a", "b", "b", "a")


def test_a_single_calls_result_needs_no_id() -> None:
    made = {"role": "assistant", "tool_calls": [call("{}", "a")]}
    assert key(USER, made, {"role": "tool", "tool_call_id": "a", "content": "1"}) == key(
        USER, made, {"role": "tool", "content": "1"}
    )


def test_tools_are_the_same_in_any_order_of_keys() -> None:
    assert digest_of([{"a": 1, "b": {"c": 2, "d": 3}}]) == digest_of([{"b": {"d": 3, "c": 2}, "a": 1}])
    assert digest_of([{"a": 1}, {"b": 2}]) != digest_of([{"b": 2}, {"a": 1}])
    assert digest_of(None) == digest_of([]) != digest_of([{}])


def test_a_message_is_read_into_the_neutral_form() -> None:
    read = read_message({**SAID, "reasoning": "r", "content": [{"type": "text", "text": "x"}]})
    assert read == Message("assistant", "x", "r", (ToolCall("f", {"a": True, "b": [1, "é"]}, "call_1"),))
    assert read_message({"role": "assistant", "tool_calls": [call("{broken")]}).tool_calls[0].arguments == "{broken"
    joined = read_message({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    assert joined.content == "a\nb"
    assert json.dumps(read.tool_calls[0].arguments, ensure_ascii=False) == '{"a": true, "b": [1, "é"]}'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "at least one message"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role is 'king'"),
        ([USER, "x"], r"messages\[1\] must be an object"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].image_url must be a data: URL"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\].function.name"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "tool_calls must be a list"),
        ([{"role": "tool", "tool_call_id": 3, "content": ""}], "tool_call_id must be a string"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(given: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        read_messages(given)


def test_a_body_is_the_conversation_without_the_system_message_it_begins_with() -> None:
    rest = [
        USER,
        SAID,
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "assistant", "content": "so"},
    ]
    bare = DigestChain(read_messages(rest))
    for system in ("a", "b"):
        chain = DigestChain(read_messages([{"role": "system", "content": system}, *rest]))
        assert [chain.body(n + 1) for n in range(1, 5)] == [bare.body(n) for n in range(1, 5)]
        assert chain.whole != bare.whole
    assert bare.body(4, 2, bare.body(2)) == bare.body(4)
    answer = read_message({"role": "assistant", "content": "more"})
    assert bare.body(4, 2, bare.body(2), answer) == bare.body(4, answer=answer) != bare.body(4)


def test_arguments_that_equal_a_declared_default_go_without_saying() -> None:
    items = {"type": "object", "properties": {"n": {"default": 1}, "on": {"default": False}}}
    properties = {"all": {"default": False}, "rows": {"type": "array", "items": items}, "free": {}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    def key(name: str, **arguments: Any) -> bytes:
        call = {"function": {"name": name, "arguments": arguments}}
        return DigestChain(read_messages([USER, {"role": "assistant", "tool_calls": [call]}]), [tool]).whole

    assert key("f", free=None) == key("f", free=None, all=False)
    assert key("f", rows=[{}, {"n": 2}]) == key("f", rows=[{"n": 1.0, "on": False}, {"n": 2}], all=False)
    assert len({key("f"), key("f", all=0), key("f", all=True), key("f", all=None), key("f", free=False)}) == 5
    assert key("g") != key("g", all=False)


@pytest.mark.parametrize(
    "tool", [5, {}, {"function": 5}, {"function": {"name": "f", "parameters": {"properties": []}}}]
)
def test_a_tool_that_declares_nothing_readable_has_no_defaults(tool: Any) -> None:
    said = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}
    assert DigestChain(read_messages([USER, said]), [tool]).whole == DigestChain(read_messages([USER, said])).whole
