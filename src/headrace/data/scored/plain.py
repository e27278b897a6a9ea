"""Numbers that may be served as they came: found by looking at their text, without making a Python object of any.

The text is known to be JSON. What is not plain is not wrong: it is read again by `lenient`, which converts or names it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from headrace.data.scored.lenient import DIGITS

_SPACE = b" \t\r\n"
_DIGITS = b"0123456789-"

#: A number that is too long covers at least one such stretch of its text from end to end.
_STRETCH = DIGITS // 2

_SHAPES: dict[type, msgspec.json.Decoder[Any]] = {
    int: msgspec.json.Decoder(list[list[list[int]]]),
    float: msgspec.json.Decoder(list[list[list[float]]]),
}


def ints(text: bytes, depth: int, like: bytes | None = None) -> bytes | None:
    """The brackets and commas of a nested list of integers, None where the text is anything else.

    `like` is a shape of the same depth that was found before: the next is often the same.
    """
    shape = text.translate(None, _DIGITS + _SPACE)
    return shape if not _too_long(text) and (shape == like or _is_shape(shape, text, depth, int)) else None


def floats(text: bytes, depth: int, like: bytes | None = None) -> bytes | None:
    """The same of floats: with a point or an exponent each, and none that could be infinite."""
    marks = text.translate(None, _DIGITS + b"+" + _SPACE)
    shape = marks.translate(None, b".e")
    marked = marks.count(b".")
    if b"e" in marks:
        if marks.count(b"e") != text.count(b"e-"):
            return None
        marked += marks.count(b",e") + marks.count(b"[e")  # those without a point
    if marked != numbers(shape):
        return None
    return shape if not _too_long(text) and (shape == like or _is_shape(shape, text, depth, float)) else None


def numbers(shape: bytes) -> int:
    """How many numbers stand in a shape of which no list is empty."""
    return shape.count(b",") + 1


def rows(shape: bytes) -> int:
    """How many lists there are in a list of lists."""
    return shape.count(b"[") - 1


def _is_shape(shape: bytes, text: bytes, depth: int, kind: type) -> bool:
    if depth == 1:
        return len(shape) > 2 and shape == b"[%b]" % (b"," * (len(shape) - 2))
    if depth == 2:
        # A row of one number looks like an empty one: neither is plain.
        inner = shape[2:-2].split(b"],[")
        return shape[:2] == b"[[" and shape[-2:] == b"]]" and all(row and not row.strip(b",") for row in inner)
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
