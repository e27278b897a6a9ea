"""`tool_choice` that requires a call, as what vLLM honours: a structural tag under which an answer is one call.

vLLM's completions know no tools. Its structural tags (xgrammar's) are trees of formats: constant texts, JSON by a
schema, free text up to an end, and sequences, choices and options of these. The tag is built from the form in which the
model's family writes calls, the same by which answers are read; so what it lets pass is read as a call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from headrace.data.errors import shown
from headrace.gateway.request import BadField
from headrace.tokens.forms import (
    CallForm,
    Channels,
    Grammar,
    JsonObject,
    KeyValues,
    NamedArguments,
    Parameters,
    PythonCall,
)

Format = dict[str, Any]
Schema = Mapping[str, Any]

#: An id as models write it between a name and the arguments: a number, or a few letters and digits.
ID_PATTERN = "[0-9A-Za-z]{1,9}"
#: A key of arguments that no schema names.
KEY_PATTERN = "[A-Za-z_][A-Za-z0-9_]*"
#: Where a schema may hold the parts that it refers to.
DEFINITIONS = ("$defs", "definitions")
ANY_TEXT: Format = {"type": "any_text"}


def forced_tool_call(grammar: Grammar, tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """`structured_outputs` under which an answer is exactly one call of one of the named tools. Raises `BadField` where
    the model's calls are not known, or hold what no tag can describe, or something is wrong in a schema."""
    form = grammar.calls
    if form is None:
        why = f": {grammar.unread}" if grammar.unread else ""
        raise BadField(
            f"tool_choice: how this model writes tool calls is not known, so none is enforced{why}; use auto or none",
            "tool_choice",
        )
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in names]
    try:
        calls = [_call(form, each["name"], each.get("parameters") or {"type": "object"}) for each in functions]
        return {"structural_tag": _as_text({"type": "structural_tag", "format": _one_of(calls)})}
    except RecursionError:
        named = ", ".join(repr(each["name"]) for each in functions)
        raise BadField(
            f"tool_choice: a schema of {named} is nested too deep to be enforced; use auto", "tool_choice"
        ) from None


def _as_text(tag: Format) -> str:
    """A tag as JSON; `RecursionError` where it is nested too deep."""
    try:
        return orjson.dumps(tag).decode()
    except orjson.JSONEncodeError as error:  # all else that was read from JSON can be written
        raise RecursionError(str(error)) from None


def _call(form: CallForm, name: str, parameters: Schema) -> Format:
    """One call, with what stands around it."""
    begin, end = form.begin + form.open, form.close + form.end
    at = f"tool {name!r}"
    match form.body:
        case JsonObject() as body:
            before, after = _json_around(body, name)
            return _sequence(_text(begin + before), _json(parameters), _text(after + end))
        case NamedArguments() as body:
            call_id = [{"type": "regex", "pattern": ID_PATTERN}, _text(body.until)] if body.until else []
            return _sequence(_text(begin + name + body.after), *call_id, _json(parameters), _text(end))
        case Parameters() as body:
            return _sequence(_text(begin + name + body.after), *_parameters(body, parameters, at), _text(end))
        case PythonCall():
            arguments = _entries(parameters, _python_argument(at), ", ", at)
            return _sequence(_text(f"{begin}{name}("), *arguments, _text(")" + end))
        case KeyValues() as body:
            value = _key_values({"type": "object", **parameters}, body.quote, at)
            return _sequence(_text(begin + name), value, _text(end))
        case Channels() as body:
            # Its end is the token that ends the turn, which is sampled once nothing else may follow.
            header = f"{body.channel}{body.calls} to={body.recipient}{name} {body.constrain}json{body.message}"
            return _sequence(_text(begin + header), _json(parameters))


def _json_around(body: JsonObject, name: str) -> tuple[str, str]:
    """What stands before and behind the arguments of a call that is a JSON object."""
    named = json.dumps(name, ensure_ascii=False)
    if not body.name:
        before, after = f"{{{named}: ", "}"
    else:
        before, after = f'{{"{body.name}": {named}, "{body.arguments}": ', "}"
    return (f'{{"{body.within}": {before}', after + "}") if body.within else (before, after)


# -- a text for each argument ------------------------------------------------------------------------------------------


def _parameters(body: Parameters, schema: Schema, at: str) -> list[Format]:
    if not _properties(schema, at) and schema.get("additionalProperties") is not False:
        key = {"type": "regex", "pattern": KEY_PATTERN}
        value = {"type": "tag", "begin": body.middle, "content": ANY_TEXT, "end": body.close}
        return [{"type": "star", "content": _sequence(_text(body.open), key, value)}]

    def entry(key: str, inner: Schema) -> Format:
        as_text, as_json = body.open + key + body.middle, body.open + key + (body.middle_json or body.middle)
        place = _parameter(at, key)
        kinds = _kinds(inner, place)
        given = _enum(inner, place)
        if given is None and "const" in inner:
            given = [inner["const"]]
        if given is not None:
            return _one_of(
                [
                    _text(as_text + each + body.close)
                    if isinstance(each, str)
                    else _text(as_json + json.dumps(each, ensure_ascii=False) + body.close)
                    for each in given
                ]
            )
        ways: list[Format] = []
        if not kinds or "string" in kinds:
            ways.append({"type": "tag", "begin": as_text, "content": ANY_TEXT, "end": body.close})
        if (kinds and "string" not in kinds) or (body.middle_json and kinds != {"string"}):
            ways.append(_sequence(_text(as_json), _json(inner), _text(body.close)))
        return _one_of(ways)

    return _entries(schema, entry, body.between, at)


def _entries(schema: Schema, entry: Callable[[str, Schema], Format], between: str, at: str) -> list[Format]:
    """The properties of an object, those that are required at least, with a text between two of them. The first that is
    required comes first of all, so that it is known where that text stands."""
    defined = {name: schema[name] for name in DEFINITIONS if name in schema}
    properties: dict[str, Schema] = {
        key: {**defined, **(inner if isinstance(inner, dict) else {})} for key, inner in _properties(schema, at).items()
    }
    names = _required(schema, at)
    required = [key for key in properties if key in names]
    written = {key: entry(key, inner) for key, inner in properties.items()}
    if not required:
        # Any of them may be the first; those behind it follow.
        keys = list(properties)
        starts = [
            _sequence(written[key], *(_optional(_after(between, written[later])) for later in keys[at + 1 :]))
            for at, key in enumerate(keys)
        ]
        return [_optional(_one_of(starts))] if starts else []
    rest = [key for key in properties if key != required[0]]
    return [
        written[required[0]],
        *(
            _after(between, written[key]) if key in required else _optional(_after(between, written[key]))
            for key in rest
        ),
    ]


# -- literals that are no JSON -----------------------------------------------------------------------------------------


def _python_argument(at: str) -> Callable[[str, Schema], Format]:
    """Writes `key=value`. JSON's strings and numbers are Python's too; its other constants are not."""

    def argument(key: str, schema: Schema) -> Format:
        place = _parameter(at, key)
        given = _enum(schema, place)
        if given is not None:
            value = _one_of([_text(json.dumps(each) if isinstance(each, str) else repr(each)) for each in given])
        elif _kinds(schema, place) == {"boolean"}:
            value = _one_of([_text("True"), _text("False")])
        elif _is_python(schema, place):
            value = _json(schema)
        else:
            raise _unforceable(place, schema, "strings, numbers, booleans, and lists of the first two")
        return _sequence(_text(f"{key}="), value)

    return argument


def _is_python(schema: Any, at: str) -> bool:
    """Whether all JSON of a schema is Python, too."""
    if not isinstance(schema, dict):
        return False
    kinds = _kinds(schema, at)
    if kinds and kinds <= {"string", "integer", "number"}:
        return True
    return kinds == {"array"} and _is_python(schema.get("items"), f"{at}[]")


def _key_values(schema: Schema, quote: str, at: str) -> Format:
    """JSON with bare keys, and strings in other quotes."""
    kinds, given = _kinds(schema, at), _enum(schema, at)
    if given is not None:
        return _one_of([_text(quote + each + quote if isinstance(each, str) else json.dumps(each)) for each in given])
    if kinds == {"string"}:
        return {"type": "tag", "begin": quote, "content": ANY_TEXT, "end": quote}
    if kinds and kinds <= {"integer", "number", "boolean", "null"}:
        return _json(schema)
    if kinds == {"object"} and (_properties(schema, at) or schema.get("additionalProperties") is False):
        entries = _entries(
            schema, lambda key, inner: _sequence(_text(f"{key}:"), _key_values(inner, quote, f"{at}.{key}")), ",", at
        )
        return _sequence(_text("{"), *entries, _text("}"))
    if kinds == {"object"} and at.startswith("tool ") and "." not in at:
        return _text("{}")
    if kinds == {"array"} and isinstance(schema.get("items"), dict):
        item = _key_values(schema["items"], quote, f"{at}[]")
        more = _optional(_sequence(item, {"type": "star", "content": _after(",", item)}))
        return _sequence(_text("["), more, _text("]"))
    raise _unforceable(at, schema, "strings, numbers, booleans, and objects and lists whose schema names their parts")


def _unforceable(at: str, schema: Schema, taken: str) -> BadField:
    given = json.dumps(schema, ensure_ascii=False, default=str)[:120]
    return BadField(
        f"tool_choice: a call of this model can only be enforced with {taken}; {at} is {given}. Use auto",
        "tool_choice",
    )


# -- what is read of a schema; what is empty or null says nothing ------------------------------------------------------


def _kinds(schema: Schema, at: str) -> set[str]:
    """The types that a schema allows; empty where it does not say."""
    given = schema.get("type") or []
    kinds = [given] if isinstance(given, str) else given
    if not _are_names(kinds):
        raise _malformed(at, "type", "a type's name, or a list of such names", given)
    return set(kinds)


def _properties(schema: Schema, at: str) -> Schema:
    """The properties of an object, by name."""
    given = schema.get("properties") or {}
    if not isinstance(given, dict):
        raise _malformed(at, "properties", "an object that has each property's schema under its name", given)
    return given


def _required(schema: Schema, at: str) -> list[str]:
    """Names of the properties that an object must have."""
    given = schema.get("required") or []
    if not _are_names(given):
        raise _malformed(at, "required", "a list of the names of properties", given)
    return list(given)


def _enum(schema: Schema, at: str) -> list[Any] | None:
    """The only values that a schema allows; None where it does not list them."""
    given = schema.get("enum")
    if given is not None and (not isinstance(given, list) or not given):
        raise _malformed(at, "enum", "a list of one value or more", given)
    return given


def _are_names(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(each, str) for each in given)


def _parameter(at: str, key: str) -> str:
    return f"{at}, parameter {key!r}"


def _malformed(at: str, part: str, wanted: str, given: Any) -> BadField:
    return BadField(f"tools: in the schema of {at}, {part} must be {wanted}, not {shown(given)}", "tools")


# -- formats -----------------------------------------------------------------------------------------------------------


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _json(schema: Schema) -> Format:
    return {"type": "json_schema", "json_schema": dict(schema)}


def _sequence(*parts: Format) -> Format:
    """Parts one after the other, without empty texts."""
    kept = [part for part in parts if part != _text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def _one_of(ways: list[Format]) -> Format:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def _after(before: str, part: Format) -> Format:
    return _sequence(_text(before), part)
