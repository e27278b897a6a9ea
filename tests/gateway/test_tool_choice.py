"""Schemas of tools that must be called, in families whose calls are no plain JSON: what is wrong in them is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.request import BadField
from headrace.gateway.tool_choice import forced_tool_call
from headrace.tokens import Grammar
from headrace.tokens.forms import CallForm, KeyValues, Parameters, PythonCall

Json = dict[str, Any]

FORMS: dict[str, CallForm] = {
    "parameters": CallForm(Parameters(after=">", open="<p=", middle=">", close="</p>"), open="<f=", close="</f>"),
    "Python": CallForm(PythonCall(), begin="[", end="]", between=", "),
    "other quotes": CallForm(KeyValues('<|"|>'), open="<call>", close="</call>"),
}


def forced(form: str, parameters: Json) -> Json:
    """The format of a call of the tool `look_up` that has these parameters."""
    tools = [{"function": {"name": "look_up", "parameters": parameters}}]
    orders = forced_tool_call(Grammar(calls=FORMS[form]), tools, ["look_up"])
    found: Json = json.loads(orders["structural_tag"])["format"]
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("part", "given"),
    [
        ("properties", ["q"]),
        ("properties", "q"),
        ("required", True),
        ("required", "q"),
        ("required", [{"q": 1}]),
    ],
    ids=str,
)
def test_what_is_wrong_in_the_schema_of_a_tool_is_named(form: str, part: str, given: Any) -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}, part: given}
    with pytest.raises(BadField, match=f"'look_up', {part} must be a") as caught:
        forced(form, schema)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("part", "given"),
    [("type", [{"x": 1}]), ("type", ["string", 3]), ("type", 3), ("enum", 3), ("enum", {"x": 1}), ("enum", [])],
    ids=str,
)
def test_what_is_wrong_in_the_schema_of_a_parameter_is_named(form: str, part: str, given: Any) -> None:
    with pytest.raises(BadField, match=f"'look_up'.*q.*, {part} must be a"):
        forced(form, {"type": "object", "properties": {"q": {part: given}}})


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_empty_or_null_say_nothing(form: str) -> None:
    """As some SDKs write what is not given, and PHP an empty object."""
    nothing = {"type": "object", "additionalProperties": False}
    assert forced(form, nothing | {"properties": [], "required": None}) == forced(form, nothing)
    plain = {"type": "object", "properties": {"q": {"type": "string"}}}
    given = {"type": "object", "properties": {"q": {"type": "string", "enum": None}}, "required": False}
    if form == "Python":  # which hands a schema on as it is
        assert forced(form, given)["type"] == forced(form, plain)["type"]
    else:
        assert forced(form, given) == forced(form, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", [300, 2000])
def test_a_schema_that_is_nested_too_deep_is_refused(form: str, depth: int) -> None:
    """Deeper than what is sent can be written, and than Python calls."""
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadField, match="schema of 'look_up' is nested too deep"):
        forced(form, {"type": "object", "properties": {"q": schema}})
