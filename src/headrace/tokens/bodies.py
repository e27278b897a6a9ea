"""Readers of one call's body: text in as it arrives, the call's name, its id and its arguments as JSON text out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from headrace.tokens.forms import JsonObject, NamedArguments
from headrace.tokens.jsontext import SPACE, JsonScanner, is_json

#: Characters of the longest name, key or id; a longer text is none.
MAX_NAME_CHARS = 256
#: What `match_words` answers where the words are not there, or may come with more text.
NO, MORE = -1, -2

NAME = re.compile(r"""[^\s<>{}()"',]+""")
NAME_END = re.compile(r"[\s<{(]")
ANY_SPACE = re.compile(r"\s*")

Words = tuple[str, ...]


def match_words(words: Words, text: str, at: int) -> int:
    """Where `words`, with any white space before each, end in a text; NO or MORE where they do not."""
    for word in words:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith(word, at):
            at += len(word)
        else:
            return MORE if word.startswith(text[at : at + len(word)]) else NO
    return at


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    most, size = 0, len(text)
    for marker in markers:
        first = marker[:1]
        at = text.find(first, max(0, size - len(marker) + 1)) if first else -1
        while at >= 0:
            if marker.startswith(text[at:]):
                most = max(most, size - at)
                break
            at = text.find(first, at + 1)
    return most


class BodyReader:
    """One call. `name` and `id` are set once `begun`: from then on it stays a call, and `pieces` takes the JSON text of
    its arguments. `done` where the body is complete, `failed` where it does not follow its form."""

    def __init__(self) -> None:
        self.name = ""
        self.id = ""
        self.begun = False
        self.done = False
        self.failed = False
        self.pieces: list[str] = []

    def feed(self, text: str, at: int = 0) -> int:
        """Takes text from `at` on; how far it was read. The rest must come again, with more behind it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the answer: a value that nothing follows is whole now."""


class JsonObjectReader(BodyReader):
    """`{"name": N, "arguments": {...}}`. An id that the form promises is waited for, since it must be told first."""

    def __init__(self, form: JsonObject, *, bare: bool) -> None:
        super().__init__()
        self._form = form
        self._bare = bare
        self._levels = 0
        self._state = "open"
        self._kind = ""
        self._streams = False
        self._scanner = JsonScanner()
        self._arguments: list[str] = []  # what is not handed out yet
        self._has_arguments = False
        self._ended = False

    def feed(self, text: str, at: int = 0) -> int:
        size = len(text)
        while at < size and not self.done and not self.failed:
            if self._state in ("key", "value"):
                at = self._scan(text, at)
            else:
                at = SPACE.match(text, at).end()  # type: ignore[union-attr]
                if at < size:
                    at += self._take(text[at])
        return at

    def _scan(self, text: str, at: int) -> int:
        scanner = self._scanner
        at = scanner.feed(text, at)
        if self._streams and scanner.pieces:
            self._hand_out("".join(scanner.pieces))
            scanner.pieces.clear()
        if scanner.broken:
            self.failed = True
        elif scanner.done:
            value = "".join(scanner.pieces)
            if self._state == "key":
                self._take_key(json.loads(value))
            else:
                self._take_value(value)
        return at

    def _take(self, char: str) -> int:
        """One character of the structure; how many of it were read."""
        state = self._state
        if state == "open" and char == "{":
            self._levels, self._state = 1, "first"
        elif state == "colon" and char == ":":
            self._state = "before value"
        elif state == "next" and char == ",":
            self._state = "more"
        elif state in ("first", "next") and char == "}":
            self._end_object()
        elif state in ("first", "more") and char == '"':
            self._scanner, self._state, self._streams = JsonScanner(), "key", False
            return 0
        elif state == "before value" and self._kind == "within" and char == "{":
            self._levels, self._state = 2, "first"
        elif state == "before value":
            # Arguments that stand there as a string are only known to be JSON once they are whole.
            self._streams = self._kind == "arguments" and char not in '"n'
            self._scanner, self._state = JsonScanner(), "value"
            return 0
        else:
            self.failed = True
            return 0
        return 1

    def _take_key(self, key: str) -> None:
        form, self._state = self._form, "colon"
        inner = self._levels == (2 if form.within else 1)
        if not form.name and inner:
            self.failed = bool(self.name) or not key
            self.name, self._kind = self.name or key, "arguments"  # a name may have been told by now
        elif inner and key == form.name:
            self._kind = "name"
        elif inner and key in (form.arguments, "arguments", "parameters"):
            self._kind = "arguments"
            self.failed = self._has_arguments
        elif self._levels == 1 and form.id and key == form.id:
            self._kind = "id"
        else:
            self._kind = "within" if self._levels == 1 and form.within and key == form.within else ""
        self._has_arguments = self._has_arguments or self._kind == "arguments"

    def _take_value(self, written: str) -> None:
        self._state = "next"
        if self._kind == "arguments" and not self._streams:
            value = json.loads(written)
            inner = value.strip() if isinstance(value, str) else ""
            self._hand_out("{}" if not value else inner if is_json(inner) else written)
        elif self._kind == "name":
            value = json.loads(written)
            self.failed = not isinstance(value, str) or not value or bool(self.name)
            self.name = self.name or (value if isinstance(value, str) else "")
            self._hand_out("")
        elif self._kind == "id":
            value = json.loads(written)
            self.id = self.id or (value if isinstance(value, str) else "")
            self._hand_out("")

    def _end_object(self) -> None:
        self._levels -= 1
        self._state = "next"
        if self._levels:
            return
        if not self.name or (self._bare and not self._has_arguments):
            self.failed = True
            return
        self._ended = True
        if not self._has_arguments:
            self._has_arguments = True
            self._hand_out("{}")
        self._hand_out("")
        self.done = True

    def _hand_out(self, piece: str) -> None:
        if piece:
            self._arguments.append(piece)
        waits = bool(self._form.id) and not self.id and not self._ended
        if self.name and not waits and self._arguments:
            self.begun = True
            self.pieces += self._arguments
            self._arguments.clear()


class NamedReader(BodyReader):
    """The beginning that forms share in which a name stands as it is: the name, and what ends it."""

    def __init__(self, after: str, ends: Words) -> None:
        super().__init__()
        self._after: Words = tuple(after.split())
        self._ends = ends
        self._state = "name"

    def feed(self, text: str, at: int = 0) -> int:
        while not self.done and not self.failed:
            before, state = at, self._state
            at = getattr(self, "_in_" + state)(text, at)
            if at == before and state == self._state:
                break
        return at

    def _in_name(self, text: str, at: int) -> int:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if self._after:
            end = text.find(self._after[0], at)
            then = match_words(self._after, text, end) if end >= 0 else MORE
            if end < 0:
                end = len(text) - held_back(text[at:], self._after[:1])
        else:
            found = NAME_END.search(text, at)
            end = found.start() if found else len(text)
            then = end if found else MORE
        name = text[at:end].rstrip()
        if then == NO or len(name) > MAX_NAME_CHARS or (not NAME.fullmatch(name) and (name or then != MORE)):
            self.failed = True
        elif then != MORE:
            self.name, self._state = name, self._next_after_name()
            return then
        return at

    def _next_after_name(self) -> str:
        raise NotImplementedError

    def _ends_here(self, text: str, at: int) -> bool:
        return any(text.startswith(end, at) for end in self._ends)

    def _may_end_here(self, text: str, at: int) -> bool:
        return any(end.startswith(text[at : at + len(end)]) for end in self._ends)


class NamedArgumentsReader(NamedReader):
    """`N after {...}`, with an id between where the form has one."""

    def __init__(self, form: NamedArguments, ends: Words) -> None:
        super().__init__(form.after, ends)
        self._form = form
        self._until: Words = tuple(form.until.split())
        self._scanner = JsonScanner()

    def _next_after_name(self) -> str:
        return "id" if self._until else "arguments"

    def _in_id(self, text: str, at: int) -> int:
        end = text.find(self._until[0], at)
        then = match_words(self._until, text, end) if end >= 0 else MORE
        known = end if end >= 0 else len(text) - held_back(text[at:], self._until[:1])
        if then == NO or known - at > MAX_NAME_CHARS:
            self.failed = True
        elif then != MORE:
            if self._form.id:
                self.id = self._form.id.replace("{name}", self.name).replace("{id}", text[at:end].strip())
            self._state = "arguments"
            return then
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        if not self.begun:
            at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                return at
            if self._may_end_here(text, at):
                if self._ends_here(text, at):
                    self.begun = self.done = True
                    self.pieces.append("{}")
                return at
        at = self._scanner.feed(text, at)
        self._take_scanned()
        return at

    def _take_scanned(self) -> None:
        if self._scanner.pieces:
            self.begun = True
            self.pieces += self._scanner.pieces
            self._scanner.pieces.clear()
        self.done, self.failed = self._scanner.done, self._scanner.broken

    def finish(self) -> None:
        if self._state == "arguments":
            self._scanner.finish()
            self._take_scanned()
