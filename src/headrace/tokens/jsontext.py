"""JSON as it arrives: what of it is certainly the beginning of a value that every JSON library reads."""

from __future__ import annotations

import json
import math
import re
from typing import Any

#: Levels that a call's arguments may nest: JSON libraries recurse, and give up at some hundreds.
MAX_NESTING = 100
#: Characters of the longest number: Python reads integers of up to 4,300 digits.
MAX_NUMBER_CHARS = 4000

SPACE = re.compile(r"[ \t\n\r]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
WORD = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(rf'\\(["\\/bfnrt]|u(?![dD][89a-fA-F]){HEX}{{4}}|u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}})')
ESCAPE_BEGUN = re.compile(rf"\\(u({HEX}{{0,3}}|[dD][89abAB]{HEX}{{2}}(\\(u([dD]([c-fC-F]{HEX}?)?)?)?)?)?)?")

_VALUE, _FIRST_VALUE, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING, _ESCAPE, _WORD = range(9)


class JsonScanner:
    """One JSON value, text in. `pieces` takes what is valid, piece by piece, and may be emptied at any time.

    Valid means portable as well: no lone surrogate, nothing infinite, not nested too deep. Numbers and escapes are held
    until they are whole. Afterwards either `done`, or `broken` at the first character that no such value goes on with.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.done = False
        self.broken = False
        self._state = _VALUE
        self._objects: list[bool] = []  # for each open container, whether it is an object
        self._key = False
        self._held = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Takes text from `at` on; where it stopped: behind the value, at what breaks it, or at the text's end."""
        begin, size = at, len(text)
        while at < size and not self.done and not self.broken:
            state = self._state
            if state == _STRING:
                at = PLAIN.match(text, at).end()  # type: ignore[union-attr]
                if at == size:
                    break
                if text[at] == '"':
                    at += 1
                    self._end_string()
                elif text[at] == "\\":
                    self.pieces.append(text[begin:at])
                    begin, self._held, self._state = at, "", _ESCAPE
                else:
                    self.broken = True
            elif state == _ESCAPE:
                self._held += text[at]
                at += 1
                if ESCAPE.fullmatch(self._held):
                    self.pieces.append(self._held)
                    self._state = _STRING
                elif not ESCAPE_BEGUN.fullmatch(self._held):
                    self.broken = True
                begin = at
            elif state == _WORD:
                end = WORD.match(text, at).end()  # type: ignore[union-attr]
                self._held += text[at:end]
                begin = at = end
                if end < size or len(self._held) > MAX_NUMBER_CHARS:
                    self._end_word()
            else:
                at = SPACE.match(text, at).end()  # type: ignore[union-attr]
                if at < size:
                    if state <= _FIRST_VALUE and (text[at] == "-" or text[at].isalnum()):
                        self.pieces.append(text[begin:at])
                        begin, self._held, self._state = at, "", _WORD
                    else:
                        at += self._take(text[at])
        if begin < at:
            self.pieces.append(text[begin:at])
        return at

    def finish(self) -> None:
        """Ends the text: a number that nothing follows is whole now."""
        if self._state == _WORD and not self.done and not self.broken:
            self._end_word()

    def _take(self, char: str) -> int:
        """One character of the structure; 1 where it fits, else 0 and the value is broken."""
        state = self._state
        if state in (_VALUE, _FIRST_VALUE) and char in '{["':
            if char == '"':
                self._state, self._key = _STRING, False
                return 1
            if len(self._objects) < MAX_NESTING - 1:
                self._objects.append(char == "{")
                self._state = _FIRST_KEY if char == "{" else _FIRST_VALUE
                return 1
        elif state in (_FIRST_KEY, _KEY) and char == '"':
            self._state, self._key = _STRING, True
            return 1
        elif state == _COLON and char == ":":
            self._state = _VALUE
            return 1
        elif state == _NEXT and char == ",":
            self._state = _KEY if self._objects[-1] else _VALUE
            return 1
        if char == "}" and self._objects[-1:] == [True] and state in (_FIRST_KEY, _NEXT):
            self._end_value(pop=True)
            return 1
        if char == "]" and self._objects[-1:] == [False] and state in (_FIRST_VALUE, _NEXT):
            self._end_value(pop=True)
            return 1
        self.broken = True
        return 0

    def _end_string(self) -> None:
        if self._key:
            self._state = _COLON
        else:
            self._end_value()

    def _end_word(self) -> None:
        if is_json_word(self._held):
            self.pieces.append(self._held)
            self._end_value()
        else:
            self.broken = True

    def _end_value(self, *, pop: bool = False) -> None:
        if pop:
            self._objects.pop()
        self._state = _NEXT
        self.done = not self._objects


def is_json_word(word: str) -> bool:
    """Whether a word is a JSON number that is finite, or true, false or null."""
    if word in ("true", "false", "null"):
        return True
    if len(word) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(word):
        return False
    return math.isfinite(float(word)) if any(char in word for char in ".eE") else True


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, and portable."""
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.finish()
    return scanner.done and not text[end:].strip(" \t\n\r")


def escaped(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_portable_json(value: Any) -> bool:
    """Whether a value can be passed on as JSON by everybody: nothing infinite, no lone surrogate, not nested too deep.

    A model writes other values too; a call with one of those is no call."""
    left: list[tuple[Any, int]] = [(value, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= letter <= "\udfff" for letter in item):
                return False
        elif isinstance(item, float):
            if not math.isfinite(item):
                return False
        elif isinstance(item, dict | list):
            if depth == MAX_NESTING:
                return False
            inner = (*item, *item.values()) if isinstance(item, dict) else item
            left += [(each, depth + 1) for each in inner]
    return True
