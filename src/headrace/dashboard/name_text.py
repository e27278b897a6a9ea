"""Names as text that a part of one is found in: a search reads bytes, not rows. Pure."""

from __future__ import annotations

from bisect import bisect_right

#: Rows whose names are joined: a text is made anew when one of its rows changed.
ROWS_A_TEXT = 4_096
#: Between two names. In a name it stands for nothing else: it is taken for a space there, and in what is looked for.
SEPARATOR = "\n"


class NameText:
    """The names of rows, by slot."""

    def __init__(self) -> None:
        self._names: list[tuple[str, str] | None] = []
        self._texts: dict[int, tuple[str, list[int]]] = {}

    def put(self, slot: int, *names: str) -> None:
        """Sets the two names of a slot."""
        if slot >= len(self._names):
            self._names += [None] * (slot + 1 - len(self._names))
        first, second = names
        if self._names[slot] != (first, second):
            self._names[slot] = (first, second)
            self._texts.pop(slot // ROWS_A_TEXT, None)

    def drop(self, slot: int) -> None:
        """A slot has no names any more."""
        self._names[slot] = None
        self._texts.pop(slot // ROWS_A_TEXT, None)

    def find(self, part: str) -> set[int]:
        """The slots with a name that has that part."""
        part = part.replace(SEPARATOR, " ")
        found: set[int] = set()
        for number in range(0, len(self._names), ROWS_A_TEXT):
            text, starts = self._text(number // ROWS_A_TEXT)
            at = text.find(part)
            while at >= 0:
                row = bisect_right(starts, at) - 1
                found.add(number + row)
                at = text.find(part, starts[row + 1]) if row + 1 < len(starts) else -1
        return found

    def _text(self, number: int) -> tuple[str, list[int]]:
        """The text of some rows, and where each begins in it."""
        known = self._texts.get(number)
        if known is None:
            pieces, starts, at = [], [], 0
            for names in self._names[number * ROWS_A_TEXT : (number + 1) * ROWS_A_TEXT]:
                piece = "".join(name.replace(SEPARATOR, " ") + SEPARATOR for name in names or ())
                starts.append(at)
                pieces.append(piece)
                at += len(piece)
            known = self._texts[number] = ("".join(pieces), starts)
        return known
