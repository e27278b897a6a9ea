"""Input as an attacker, a damaged disk or another release would send it: valid input, of which one part is something
else.

Bytes that are random throughout end at the first check of every parser. What gets further differs from valid input in
one place: a value of another type or size (`mutated`), or a few bytes that are changed, cut or repeated (`damaged`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from tests import tiers

#: Deeper than any parser should follow, and than Python's own recursion goes.
DEEP = 1500


def examples(count: int) -> settings:
    """So many examples, and twenty times as many where the long tests were asked for."""
    return settings(max_examples=20 * count if tiers.LONG.asked_for else count)


def deep(kind: str = "list", depth: int = DEEP) -> Any:
    """A value nested so deep."""
    found: Any = 1
    for _ in range(depth):
        found = [found] if kind == "list" else {"a": found}
    return found


#: Values that a field of another type, or of a bounded size, has to refuse.
HOSTILE = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, -(2**63), 0.5, -0.0, 1e308, -1e-308),
            *(
                "",
                "\x00",
                "nan",
                "1",
                "é🙂",
                "\u2028",
                "a" * 3000,
                "../../etc/passwd",
                "$blob",
                "data:image/png;base64,",
            ),
            *([], {}, [[]], [None], {"": None}, [[], {}], {"type": "text"}, {"a": {"b": {"c": []}}}),
        ]
    ),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.lists(st.integers(-2, 300), max_size=4),
    st.dictionaries(st.text(max_size=6), st.none() | st.integers(-1, 9) | st.text(max_size=4), max_size=3),
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a nested value, the whole first."""
    yield ()
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        for rest in places(part):
            yield (name, *rest)


def with_part(value: Any, place: tuple[Any, ...], part: Any) -> Any:
    """A copy of a nested value with another part in one place."""
    if not place:
        return part
    found = copy.copy(value)
    found[place[0]] = with_part(value[place[0]], place[1:], part)
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: Any, hostile: st.SearchStrategy[Any] = HOSTILE, most: int = 2) -> Any:
    """A valid nested value of which one part, or a few, are replaced, left out or given twice."""
    found = valid
    for _ in range(draw(st.integers(1, most))):
        place = draw(st.sampled_from(list(places(found))))
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
        if how == "replace" or not place:
            found = with_part(found, place, draw(hostile))
            continue
        parent = found
        for name in place[:-1]:
            parent = parent[name]
        changed = copy.copy(parent)
        if how == "drop":
            del changed[place[-1]]
        elif isinstance(changed, list):
            changed.insert(place[-1], draw(hostile))
        else:
            changed[draw(st.text(max_size=6))] = draw(hostile)
        found = with_part(found, place[:-1], changed)
    return found


@st.composite
def damaged(draw: st.DrawFn, valid: bytes, most: int = 4) -> bytes:
    """Valid bytes after a few of them were changed, cut out, repeated, or others put between them."""
    found = bytearray(valid)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(found)))
        how = draw(st.sampled_from(["change", "cut", "put", "repeat", "end"]))
        size = draw(st.integers(1, 16))
        if how == "change":
            found[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif how == "cut":
            del found[at : at + size]
        elif how == "put":
            found[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif how == "repeat":
            found[at:at] = found[max(0, at - size) : at]
        else:
            del found[at:]
    return bytes(found)


def corpus(folder: Path) -> list[Path]:
    """The cases that were found once, each a file that a test reads again: whole input, as a parser got it."""
    found = sorted(folder.iterdir())
    assert found, f"{folder} is empty"
    return found
