"""Lists of numbers, looked at as text: how long each is, without making a Python object of any number.

Every look is a handful of passes over the bytes by numpy, which take a tenth of the time that the JSON parser takes.
The text is known to be JSON, and nothing here would hold without that: a number then has at most one point and one
exponent, and between two values there is exactly one comma.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: How long each list is, of a list of lists; of a plain list, its own length alone.
Lengths = tuple[int, ...]

_COMMA, _MINUS, _POINT, _ZERO, _NINE, _EXPONENT = b",-.09e"
#: Bytes of text in each of which there must be a comma: no number is longer than twice that. A word of words, since
#: numpy looks at eight bytes as fast as at one.
_WINDOW_BYTES = 64
#: Marks that a window of a large text may have: an exponent in each of its numbers, and brackets.
_MARKS_A_WINDOW = 8
_LARGE_BYTES = 1_000_000


def int_rows(text: bytes, depth: int) -> Lengths | None:
    """The lengths of a list (depth 1), or of a list of lists (depth 2), of integers alone.

    None where the text, which is JSON, may be anything else, has a list of fewer than two values, or numbers so long
    that a float might not hold them.
    """
    if b'"' in text or b"." in text:
        return None
    codes = np.frombuffer(text, np.uint8)
    marks = _marks(codes)
    return _lengths(codes, marks, depth) if marks is not None else None


def float_rows(text: bytes, depth: int) -> Lengths | None:
    """The same for floats, each with a point or an exponent as `repr` writes them, and none that could be infinite."""
    if b'"' in text or not text.endswith(b"]"):
        return None
    codes = np.frombuffer(text, np.uint8)
    marks = _marks(codes)
    if marks is None:
        return None
    marked = np.count_nonzero(codes == _POINT)
    exponents = marks[codes[marks] == _EXPONENT]
    if exponents.size:
        if not (codes[exponents + 1] == _MINUS).all():
            return None
        marks = marks[codes[marks] != _EXPONENT]
        # `repr` leaves the point out where one digit is all that stands before the exponent. Other numbers without a
        # point are not counted, and so not plain.
        before = codes[exponents - 2]
        marked += np.count_nonzero((before != _POINT) & ((before < _ZERO) | (before > _NINE)))
    lengths = _lengths(codes, marks, depth)
    return lengths if lengths is not None and marked == sum(lengths) else None


def _marks(codes: NDArray[np.uint8]) -> NDArray[np.intp] | None:
    """Where brackets, exponents and whatever else is no number stand. None for a large text that has far more of them
    than lists of tokens have: each takes eight bytes here."""
    beyond_digits = codes > _NINE
    if len(codes) > _LARGE_BYTES and np.count_nonzero(beyond_digits) > len(codes) // _WINDOW_BYTES * _MARKS_A_WINDOW:
        return None
    return beyond_digits.nonzero()[0]


def _lengths(codes: NDArray[np.uint8], marks: NDArray[np.intp], depth: int) -> Lengths | None:
    """The lengths of the lists whose brackets are at `marks`; None where those are not all brackets, nested as they
    must be, with nothing but lists beside the lists."""
    commas = codes == _COMMA
    brackets = codes[marks].tobytes()
    if depth == 1:
        lengths: Lengths = (int(np.count_nonzero(commas)) + 1,)
        nested = brackets == b"[]"
    else:
        ends = marks[1:-1].tolist()
        rows = zip(ends[::2], ends[1::2], strict=False)
        lengths = tuple(int(np.count_nonzero(commas[begin:end])) + 1 for begin, end in rows)
        nested = bool(lengths) and brackets == b"[%b]" % (b"[]" * len(lengths))
        nested = nested and np.count_nonzero(commas) == sum(lengths) - 1
    # A list of one value looks like an empty one: neither is plain.
    return lengths if nested and 1 not in lengths and not _too_long(commas) else None


def _too_long(commas: NDArray[np.bool_]) -> bool:
    """Whether a number may be longer than a window. Never said of numbers of fewer characters alone."""
    whole = len(commas) // _WINDOW_BYTES * _WINDOW_BYTES
    words = commas[:whole].view(np.uint64) != 0
    return not (words.view(np.uint64) != 0).all()
