"""JSON that breaks off: what of it can be told.

A model may be stopped in the middle of a tool call's arguments. What was written until then is the beginning of JSON,
and SDKs that read it as it comes keep of it what is whole. `partial_json` keeps the same, so that an answer says the
same whether it was streamed or not.
"""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_LETTERS = re.compile(r"[-+0-9.eE]*")
_CONSTANTS = {"true": True, "false": False, "null": None}
#: What stands in a text that holds no value yet.
_NOTHING = object()


def partial_json(text: str) -> Any:
    """What a beginning of JSON says: objects and lists with what is whole in them, without a string that breaks off.

    Raises `ValueError` for a text that begins no value: an empty one, a string that is open, or what is no JSON."""
    try:
        value, at = _value(text, _skip(text, 0))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if value is _NOTHING or _skip(text, at) != len(text):
        raise ValueError(f"it is no beginning of JSON: {text[:80]!r}")
    return value


def begun_object(text: str) -> dict[str, Any] | None:
    """What a text says that begins a JSON object, or would: nothing of it is an empty one. None for any other text."""
    if not text.strip():
        return {}
    try:
        found = partial_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value at a place and where it ends: at the end of the text where it breaks off."""
    end = len(text)
    if at == end:
        return _NOTHING, end
    first = text[at]
    if first == "{":
        return _object(text, at + 1)
    if first == "[":
        return _list(text, at + 1)
    if first == '"':
        return _string(text, at)
    if first in "-0123456789":
        run = _NUMBER_LETTERS.match(text, at)
        assert run is not None
        if _NUMBER.fullmatch(run[0]):
            return json.loads(run[0]), run.end()
        if run.end() == end:
            return _NOTHING, end
    for name, constant in _CONSTANTS.items():
        if text.startswith(name, at):
            return constant, at + len(name)
        if name.startswith(text[at : at + len(name)]):
            return _NOTHING, end
    raise ValueError(f"{text[at : at + 20]!r} is no JSON")


def _string(text: str, at: int) -> tuple[Any, int]:
    quote = at + 1
    while (quote := text.find('"', quote)) >= 0:
        before = quote  # the first of the backslashes before it; none is counted twice, since a quote stands between
        while text[before - 1] == "\\":
            before -= 1
        if (quote - before) % 2 == 0:
            return json.loads(text[at : quote + 1]), quote + 1
        quote += 1
    return _NOTHING, len(text)


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    end, at = len(text), _skip(text, at)
    if text.startswith("}", at):
        return found, at + 1
    while at < end:
        if text[at] != '"':
            raise ValueError(f"{text[at : at + 20]!r} is no key")
        key, at = _string(text, at)
        at = _skip(text, at)
        if at == end:
            break
        if text[at] != ":":
            raise ValueError(f"{text[at : at + 20]!r} stands where a colon must")
        value, at = _value(text, _skip(text, at + 1))
        if value is not _NOTHING:
            found[key] = value
        at = _skip(text, at)
        if text.startswith("}", at):
            return found, at + 1
        at = _after_comma(text, at)
    return found, end


def _list(text: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    end, at = len(text), _skip(text, at)
    if text.startswith("]", at):
        return found, at + 1
    while at < end:
        value, at = _value(text, at)
        if value is not _NOTHING:
            found.append(value)
        at = _skip(text, at)
        if text.startswith("]", at):
            return found, at + 1
        at = _after_comma(text, at)
    return found, end


def _after_comma(text: str, at: int) -> int:
    """Where the next entry begins; the end of a text that breaks off before it."""
    if at == len(text):
        return at
    if text[at] != ",":
        raise ValueError(f"{text[at : at + 20]!r} stands where a comma must")
    return _skip(text, at + 1)
