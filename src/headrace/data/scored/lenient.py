"""A field's values, one by one: converted where Python would take them, else `InvalidInput` that names the place.

`"12"`, `1.0` and `true` are integers, integers and numbers in quotes are floats; NaN and infinity are nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from headrace.data.errors import InvalidInput, shown

#: Integers have no limit in Python; what no float holds either is taken for an attack.
DIGITS = 300
_MOST = 10**DIGITS
#: Values nested deeper than this are taken for an attack.
DEEPEST = 100

_INTEGER = re.compile(r"[+-]?\d{1,300}(\.0*)?", re.ASCII)


def parse(text: bytes, field: str) -> Any:
    """The JSON of one field; the text is known to be JSON, but not to be UTF-8."""
    if text.count(b"[") + text.count(b"{") > DEEPEST and _too_deep(text):
        raise InvalidInput(f"{field} is nested more than {DEEPEST} deep")
    try:
        return json.loads(text.decode())
    except UnicodeError:
        raise InvalidInput(f"{field} holds a string that is no UTF-8") from None
    except ValueError as error:
        raise InvalidInput(f"{field} cannot be read: {error}") from None


def integer(value: Any, where: str) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value.strip().partition(".")[0])
    elif isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    if not isinstance(value, int):
        raise InvalidInput(f"{where} must be an integer, not {shown(value)}")
    if not -_MOST < value < _MOST:
        raise InvalidInput(f"{where} is an integer of more than {DIGITS} digits, which is out of range")
    return int(value)


def number(value: Any, where: str) -> float:
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


def nested(value: Any, depth: int, one: Callable[[Any, str], Any], where: str) -> Any:
    """`value` with `one` applied to what lies so many lists deep."""
    if not depth:
        return one(value, where)
    if not isinstance(value, list):
        raise InvalidInput(f"{where} must be a list, not {shown(value)}")
    found: list[Any] = []
    try:
        for item in value:
            found.append(nested(item, depth - 1, one, ""))
    except InvalidInput as error:  # named on the way out: most values are right, and there are many
        raise InvalidInput(f"{where}[{len(found)}]{error}") from None
    return found


def check_other(field: str, value: Any) -> None:
    """A field that holds no lists of numbers: it is served as it came, if it is of its kind and finite throughout."""
    if field in ("generation_params", "group_overrides"):
        _object(value, field)
    elif field == "overrides":
        nested(value, 1, _object, field)
    elif field == "messages":
        nested(value, 2, _message, field)
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
        number(value, where)
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            try:
                _finite(item, "")
            except InvalidInput as error:
                place = f".{key[:40]}" if isinstance(key, str) else f"[{key}]"
                raise InvalidInput(f"{where}{place}{error}") from None


#: A string, or what is left of one that does not end; possessive, so that no text takes more than one look.
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
_STRINGS = re.compile(STRING, re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def _too_deep(text: bytes) -> bool:
    """Whether brackets are left when those that hold nothing were taken away as often as may be."""
    brackets = _STRINGS.sub(b"", text).translate(_ONE_KIND, _NO_BRACKETS)
    for _ in range(DEEPEST):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)
