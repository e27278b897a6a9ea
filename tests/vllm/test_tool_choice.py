"""The structural tags that force a call, compiled by vLLM's own xgrammar: a call as its family writes it passes, and
what is no call of the tools does not."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from tests.venvs import VLLM

from headrace.gateway.request import BadField
from headrace.gateway.tool_choice import forced_tool_call
from headrace.tokens import Grammar, ToolCall
from headrace.tokens.forms import (
    CallForm,
    Channels,
    JsonObject,
    KeyValues,
    NamedArguments,
    Parameters,
    PythonCall,
)

Json = dict[str, Any]

FORMS: dict[str, CallForm] = {
    "an object": CallForm(JsonObject(), open="<tool_call>\n", close="\n</tool_call>", between="\n"),
    "a list": CallForm(JsonObject(), begin="[TOOL_CALLS] [", end="]", between=", "),
    "bare": CallForm(JsonObject(arguments="parameters"), lead="<|python_tag|>"),
    "the name as key": CallForm(JsonObject(name=""), begin="<|tools_prefix|>[", end="]<|tools_suffix|>", between=", "),
    "an inner object": CallForm(JsonObject(within="function"), open="<call>", close="</call>"),
    "a name before it": CallForm(
        NamedArguments(after="\n```json\n"), begin="<calls>", end="</calls>", open="<call>", close="\n```</call>"
    ),
    "a name and an id": CallForm(
        NamedArguments(after=":", until="<args>", id="functions.{name}:{id}"), open="<call>functions.", close="</call>"
    ),
    "no end": CallForm(NamedArguments(after="[ARGS]"), open="[TOOL_CALLS]"),
    "parameters": CallForm(
        Parameters(after=">\n", open="<parameter=", middle=">\n", close="\n</parameter>", between="\n"),
        open="<tool_call>\n<function=",
        close="\n</function>\n</tool_call>",
    ),
    "keys and values": CallForm(
        Parameters(after="\n", open="<arg_key>", middle="</arg_key>\n<arg_value>", close="</arg_value>\n"),
        open="<tool_call>",
        close="</tool_call>",
    ),
    "marked strings": CallForm(
        Parameters(
            after='">\n',
            open='<p name="',
            middle='" string="true">',
            middle_json='" string="false">',
            close="</p>",
            between="\n",
        ),
        open='<invoke name="',
        close="\n</invoke>",
    ),
    "Python": CallForm(PythonCall(), begin="<|start|>[", end="]<|end|>", between=", "),
    "other quotes": CallForm(KeyValues('<|"|>'), open="<|tool_call>call:", close="<tool_call|>"),
    "channels": CallForm(Channels()),
}
LOOK: Json = {
    "type": "object",
    "properties": {
        "q": {"type": "string"},
        "n": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["q", "n"],
}
ANY: Json = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}
NOTHING: Json = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Json] = [
    {"function": {"name": "look", "parameters": LOOK}},
    {"function": {"name": "any", "parameters": ANY}},
    {"function": {"name": "nothing", "parameters": NOTHING}},
    {"function": {"name": "bare"}},
]
PASS: list[tuple[str, Json]] = [
    ("look", {"q": "a b\n<c>", "n": 3}),
    ("look", {"q": "x", "n": -1, "tags": ["a", "b"]}),
    ("look", {"q": "x", "n": 7, "unit": "F"}),
    ("any", {}),
    ("any", {"n": 2}),
    ("any", {"q": "y", "n": 2}),
    ("nothing", {}),
    ("bare", {}),
]
FAIL: list[tuple[str, Json]] = [
    ("look", {"q": "x"}),
    ("look", {"q": "x", "n": "three"}),
    ("look", {"q": "x", "n": 1, "unit": "K"}),
    ("other", {}),
]
SCRIPT = """
import json, sys, xgrammar
from xgrammar.testing import _is_grammar_accept_string
found = []
for tag, texts in json.load(sys.stdin):
    grammar = xgrammar.Grammar.from_structural_tag(tag)
    found.append([_is_grammar_accept_string(grammar, text) for text in texts])
json.dump(found, sys.stdout)
"""


def written(form: CallForm, name: str, arguments: Json) -> str:
    """A call up to the token that ends the turn; strings in the quotes that JSON has, too."""
    text = form.written([ToolCall(name, arguments, f"functions.{name}:0")])
    if isinstance(form.body, PythonCall):
        return text.replace("'", '"')
    return text.removesuffix(form.body.call) if isinstance(form.body, Channels) else text


def forced(form: CallForm, tools: list[Json]) -> str:
    names = [tool["function"]["name"] for tool in tools]
    return str(forced_tool_call(Grammar(calls=form), tools, names)["structural_tag"])


def test_what_passes_is_one_call_of_one_of_the_tools() -> None:
    asked = []
    for form in FORMS.values():
        calls = [written(form, name, arguments) for name, arguments in PASS + FAIL]
        asked.append((forced(form, TOOLS), [*calls, "Hello.", f"{calls[0]} and more"]))
    done = subprocess.run(
        [VLLM.python(), "-c", SCRIPT], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    found = dict(zip(FORMS, json.loads(done.stdout), strict=True))
    expected = [True] * len(PASS) + [False] * (len(FAIL) + 2)
    assert {name: expected for name in FORMS} == found


@pytest.mark.parametrize("form", ["Python", "other quotes"])
def test_parameters_that_no_tag_describes_are_named(form: str) -> None:
    loose = {"type": "object", "properties": {"loose": {"type": "object"}}}
    with pytest.raises(BadField, match=r"'odd'.*loose"):
        forced(FORMS[form], [{"function": {"name": "odd", "parameters": loose}}])
