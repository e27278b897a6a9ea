"""The values of a scored group's field: numbers that may be served as they came, and the conversion of all others.

Numbers are first looked at as text (`plain_ints`, `plain_floats`), without making a Python object of any; nearly all
bodies are plain. What is not plain is not wrong: it is read value by value and converted where Python would take it, or
refused with an `InvalidInput` that names the place. `"12"`, `1.0` and `true` are integers, integers and numbers in
quotes are floats; NaN and infinity are nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import InvalidInput, shown
from headrace.data.scored.rows import Lengths, float_rows, int_rows

#: Integers have no limit in Python; what no float holds either is taken for an attack.
MAX_DIGITS = 300
#: Values nested deeper than this are taken for an attack.
MAX_DEPTH = 100
#: A JSON string, or what is left of one that does not end; possessive, so that no text takes more than one look.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'

_TOO_LARGE = 10**MAX_DIGITS
_INTEGER = re.compile(r"[+-]?\d{1,300}(\.0*)?", re.ASCII)
_STRINGS = re.compile(STRING, re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_SPACE = b" \t\r\n"
_DIGITS = b"0123456789-"
#: A number that is too long covers at least one such stretch of its text from end to end.
_STRETCH = MAX_DIGITS // 2
_SHAPES: dict[type, msgspec.json.Decoder[Any]] = {
    int: msgspec.json.Decoder(list[list[list[int]]]),
    float: msgspec.json.Decoder(list[list[list[float]]]),
}


# -- as text -----------------------------------------------------------------------------------------------------------


def plain_ints(text: bytes, depth: int) -> Lengths | None:
    """The lengths of the lists (see `rows`) where the text, which is known to be JSON, is a list of integers nested so
    deep, and can be served as it came; of one that is nested three deep, nothing. None where it is anything else."""
    if depth < 3:
        return int_rows(text, depth)
    shape = text.translate(None, _DIGITS + _SPACE)
    return () if not _too_long(text) and _nested_three_deep(shape, text, int) else None


def plain_floats(text: bytes, depth: int) -> Lengths | None:
    """The same for floats: each with a point or an exponent, and none that could be infinite."""
    if depth < 3:
        return float_rows(text, depth)
    marks = text.translate(None, _DIGITS + b"+" + _SPACE)
    shape = marks.translate(None, b".e")
    marked = marks.count(b".")
    if b"e" in marks:
        if marks.count(b"e") != text.count(b"e-"):
            return None
        marked += marks.count(b",e") + marks.count(b"[e")  # those without a point
    if marked != shape.count(b",") + 1:
        return None
    return () if not _too_long(text) and _nested_three_deep(shape, text, float) else None


def _nested_three_deep(shape: bytes, text: bytes, kind: type) -> bool:
    """Whether the text, whose brackets and commas are `shape`, is a list of lists of lists of numbers."""
    try:
        _SHAPES[kind].decode(text)
    except msgspec.DecodeError:
        return False
    return not shape.translate(None, b"[],")


def _too_long(text: bytes) -> bool:
    """Whether a number may have as many characters as no number may have digits. Never said of short numbers alone."""
    whole = len(text) // _STRETCH
    commas = np.frombuffer(text, np.uint8, whole * _STRETCH) == ord(",")
    return not commas.reshape(whole, _STRETCH).any(axis=1).all()


# -- one by one -------------------------------------------------------------------------------------------------------


def parse_json(text: bytes, field: str) -> Any:
    """The JSON of one field; the text is known to be JSON, but not to be UTF-8."""
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _too_deep(text):
        raise InvalidInput(f"{field} is nested more than {MAX_DEPTH} deep")
    try:
        return json.loads(text.decode())
    except UnicodeError:
        raise InvalidInput(f"{field} holds a string that is no UTF-8") from None
    except ValueError as error:
        raise InvalidInput(f"{field} cannot be read: {error}") from None


def as_int(value: Any, where: str) -> int:
    """The value as an integer, if it is one in any spelling; `where` names it in the error."""
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value.strip().partition(".")[0])
    elif isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    if not isinstance(value, int):
        raise InvalidInput(f"{where} must be an integer, not {shown(value)}")
    if not -_TOO_LARGE < value < _TOO_LARGE:
        raise InvalidInput(f"{where} is an integer of more than {MAX_DIGITS} digits, which is out of range")
    return int(value)


def as_float(value: Any, where: str) -> float:
    """The value as a finite float, if it is one in any spelling; `where` names it in the error."""
    if not isinstance(value, int | float | str):
        raise InvalidInput(f"{where} must be a number, not {shown(value)}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except ValueError:
        raise InvalidInput(f"{where} must be a number, not {shown(value)}") from None
    if not math.isfinite(found):
        raise InvalidInput(f"{where} is NaN or infinite; it must be a finite number")
    return found


def map_nested(value: Any, depth: int, one: Callable[[Any, str], Any], where: str) -> Any:
    """`value` with `one` applied to what lies so many lists deep."""
    if not depth:
        return one(value, where)
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be a list, not {shown(value)}")
    found: list[Any] = []
    try:
        for item in value:
            found.append(map_nested(item, depth - 1, one, ""))
    except InvalidInput as error:  # named on the way out: most values are right, and there are many
        raise InvalidInput(f"{where}[{len(found)}]{error}") from None
    return found


def check_other(field: str, value: Any) -> None:
    """A field that holds no lists of numbers: it is served as it came, if it is of its kind and finite throughout."""
    if field in ("generation_params", "group_overrides"):
        _object(value, field)
    elif field == "overrides":
        map_nested(value, 1, _object, field)
    elif field == "messages":
        map_nested(value, 2, _message, field)
    _finite(value, field)


def _object(value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InvalidInput(f"{where} must be an object, not {shown(value)}")
    return value


def _message(value: Any, where: str) -> Any:
    for key in ("role", "content"):
        if key not in _object(value, where):
            raise InvalidInput(f"{where} has no {key}; a message has a role and a content")
    return value


def _finite(value: Any, where: str) -> None:
    if isinstance(value, float):
        as_float(value, where)
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            try:
                _finite(item, "")
            except InvalidInput as error:
                place = f".{key[:40]}" if isinstance(key, str) else f"[{key}]"
                raise InvalidInput(f"{where}{place}{error}") from None


def _too_deep(text: bytes) -> bool:
    """Whether brackets are left when those that hold nothing were taken away as often as may be."""
    brackets = _STRINGS.sub(b"", text).translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
