"""What stands in one text and not in another, by words or by lines. Pure; its time is bounded, whatever they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

Change = Literal["same", "removed", "added"]
#: A run of a text, and what became of it.
Piece = tuple[Change, str]

#: Words (else lines) of the parts that differ which are compared one by one: the time is their product.
MAX_UNITS = 400
#: Characters that are compared at all, between where two texts first and last differ.
MAX_COMPARED = 40_000
#: Characters of what stays that are shown on either side of a change, and of a change.
MAX_SAME, MAX_CHANGED = 160, 4_000

#: Characters between two changes, without a letter among them, that do not part them.
MAX_SPECK = 3

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")


def text_diff(before: str, after: str) -> list[Piece]:
    """The pieces of both texts in order: those of `before` are the same or removed, those of `after` the same or added.
    Long runs are shortened, which "…" says. Empty where the texts are equal."""
    if before == after:
        return []
    begin = _common(before, after)
    end = _common(before[begin:][::-1], after[begin:][::-1])
    begin, end = max(0, begin - MAX_SAME), max(0, end - MAX_SAME)
    first, second = (text[begin : len(text) - end] for text in (before, after))
    return _shortened(
        [
            ("same", before[:begin]),
            *_compared(first[:MAX_COMPARED], second[:MAX_COMPARED]),
            ("removed", first[MAX_COMPARED:]),
            ("added", second[MAX_COMPARED:]),
            ("same", before[len(before) - end :]),
        ]
    )


def _compared(before: str, after: str) -> list[Piece]:
    for units in (_WORDS, _LINES):
        a, b = units.findall(before), units.findall(after)
        start = _common(a, b)
        end = _common(a[start:][::-1], b[start:][::-1])
        middle_a, middle_b = a[start : len(a) - end], b[start : len(b) - end]
        if max(len(middle_a), len(middle_b)) <= MAX_UNITS:
            same_after = "".join(a[len(a) - end :])
            return [("same", "".join(a[:start])), *_longest_common(middle_a, middle_b), ("same", same_after)]
    return [("removed", before), ("added", after)]


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items from the first on two runs have in common."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _longest_common(a: Sequence[str], b: Sequence[str]) -> list[Piece]:
    """Two short runs by their longest common subsequence."""
    lengths = [[0] * (len(b) + 1)]
    for x in reversed(a):
        below, row = lengths[-1], [0] * (len(b) + 1)
        for at in range(len(b) - 1, -1, -1):
            row[at] = below[at + 1] + 1 if x == b[at] else max(below[at], row[at + 1])
        lengths.append(row)
    lengths.reverse()  # lengths[i][j]: of a from i on and b from j on
    found: list[Piece] = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            found.append(("same", a[i]))
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            found.append(("removed", a[i]))
            i += 1
        else:
            found.append(("added", b[j]))
            j += 1
    found.append(("removed", "".join(a[i:])))
    found.append(("added", "".join(b[j:])))
    return found


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """What stays in one piece, and what changed in two: all that was removed there, and all that was added."""
    found: list[Piece] = []
    for stays, those in groupby((piece for piece in pieces if piece[1]), lambda piece: piece[0] == "same"):
        run = list(those)
        kinds: tuple[Change, ...] = ("same",) if stays else ("removed", "added")
        found += [(kind, "".join(text for one, text in run if one == kind)) for kind in kinds]
    return [piece for piece in found if piece[1]]


def _without_specks(pieces: Sequence[Piece]) -> list[Piece]:
    """Texts that have but spaces and points in common are shown as one change, and not as one between any two."""
    found: list[Piece] = []
    for at, (kind, text) in enumerate(pieces):
        if kind == "same" and 0 < at < len(pieces) - 1 and len(text) <= MAX_SPECK and not re.search(r"\w", text):
            found += [("removed", text), ("added", text)]
        else:
            found.append((kind, text))
    return found


def _shortened(pieces: Sequence[Piece]) -> list[Piece]:
    found: list[Piece] = []
    pieces = _merged(_without_specks(_merged(pieces)))
    for at, (kind, text) in enumerate(pieces):
        if kind != "same":
            cut = len(text) - MAX_CHANGED
            found.append((kind, f"{text[:MAX_CHANGED]}… ({cut:,} more characters)" if cut > 0 else text))
            continue
        head = "" if at == 0 else text[:MAX_SAME]
        tail = "" if at == len(pieces) - 1 else text[-MAX_SAME:]
        found.append((kind, text if len(text) <= 2 * MAX_SAME else f"{head}…{tail}"))
    return found
