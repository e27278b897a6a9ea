"""Readers of calls whose arguments are not written as JSON: parameters, Python, keys and values. They make it JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.tokens.bodies import (
    ANY_SPACE,
    MAX_NAME_CHARS,
    MORE,
    NO,
    BodyReader,
    JsonObjectReader,
    NamedArgumentsReader,
    NamedReader,
    Words,
    held_back,
    match_words,
)
from headrace.tokens.forms import CallForm, JsonObject, KeyValues, NamedArguments, Parameters
from headrace.tokens.jsontext import JsonScanner, escaped, is_json, is_json_word, is_portable_json

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
PYTHON_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=\s*")
#: What a value begins with that may be JSON and no string, or a word of Python's.
JSON_STARTS = frozenset('{["-0123456789tfnTFN')
#: The types that a tool's schema allows each parameter, by tool and parameter; none where it does not say.
ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]


class ParametersReader(NamedReader):
    """`N after (open KEY middle VALUE close) ...`. Strings are handed out as they come, other values once whole."""

    def __init__(self, form: Parameters, ends: Words, types: ParameterTypes) -> None:
        super().__init__(form.after, (*ends, *form.open.split()[:1]))
        self._call_ends = ends
        self._open: Words = tuple(form.open.split())
        self._between: Words = tuple(form.between.split())
        self._middles = [(tuple(form.middle.split()), _layout_after(form.middle), False)]
        if form.middle_json:
            self._middles.append((tuple(form.middle_json.split()), _layout_after(form.middle_json), True))
        self._marked = bool(form.middle_json)
        self._close = form.close.strip()
        self._layout = form.close[: len(form.close) - len(form.close.lstrip())]  # white space before `close`
        self._types = types
        self._lead = ""
        self._kinds: frozenset[str] = frozenset()
        self._held: list[str] = []
        self._streams = False
        self._count = 0

    def _next_after_name(self) -> str:
        return "next"

    def _in_next(self, text: str, at: int) -> int:
        opened = match_words(self._open, text, at)
        if opened >= 0:
            self._begin()
            self._state = "key"
            return opened
        here = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if here < len(text) and any(text.startswith(end, here) for end in self._call_ends):
            self._begin()
            self.pieces.append("}")
            self.done = True
            return here
        parted = match_words(self._between, text, at) if self._between and self._count else NO
        if parted >= 0:
            return parted
        may_end = any(end.startswith(text[here : here + len(end)]) for end in self._call_ends)
        self.failed = opened == NO and parted == NO and not may_end
        return at

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.pieces.append("{")

    def _in_key(self, text: str, at: int) -> int:
        places = [place for words, *_ in self._middles if (place := text.find(words[0], at)) >= 0]
        held = held_back(text[at:], [words[0] for words, *_ in self._middles])
        end = min(places, default=len(text) - held)
        if not places or end - at > MAX_NAME_CHARS:
            self.failed = end - at > MAX_NAME_CHARS
            return at
        ends = [(match_words(words, text, end), lead, marked) for words, lead, marked in self._middles]
        found = [item for item in ends if item[0] >= 0]
        if not found:
            self.failed = all(item[0] == NO for item in ends)
            return at
        then, self._lead, is_marked = max(found, key=lambda item: item[0])
        key = text[at:end].strip()
        self._kinds = self._types.get(self.name, {}).get(key, frozenset())
        if self._marked:
            self._kinds = frozenset({"json"} if is_marked else {"string"})
        self._streams = self._kinds == {"string"}
        self.pieces.append(f"{', ' if self._count else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._count += 1
        self._state = "lead"
        return then

    def _in_lead(self, text: str, at: int) -> int:
        """The layout before a value, and what its first character tells of it."""
        lead = self._lead
        if lead and lead.startswith(text[at : at + len(lead)]):
            if len(text) - at < len(lead):
                return at
            self._lead = ""
            return at + len(lead)
        if at == len(text):
            return at
        # Only the first character decides, so that it makes no difference how much of the text is there.
        first = text[at]
        if not self._kinds and first not in JSON_STARTS and not first.isspace() and first != self._close[0]:
            self._streams = True
        if self._streams:
            self.pieces.append('"')
        self._state = "value"
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = text.find(self._close, at)
        if end < 0:
            stop = len(text) - held_back(text[at:], (self._layout + self._close, self._close))
            self._take(text[at:stop])
            return stop
        layout = self._layout
        stop = end - len(layout) if layout and text.endswith(layout, at, end) else end
        self._take(text[at:stop])
        if self._streams:
            self.pieces.append('"')
        else:
            self.pieces.append(typed("".join(self._held), self._kinds))
            self._held.clear()
        self._state = "next"
        return end + len(self._close)

    def _take(self, piece: str) -> None:
        if self._streams:
            if piece:
                self.pieces.append(escaped(piece))
        else:
            self._held.append(piece)


def _layout_after(literal: str) -> str:
    """The white space that a literal ends with."""
    return literal[len(literal.rstrip()) :]


def typed(raw: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value that stands as it is, by the types that are allowed for it; all, where none is named."""
    text = raw.strip()
    text = PYTHON_WORDS.get(text, text)
    if kinds != {"string"} and is_json(text):
        value = json.loads(text)
        is_allowed = "string" not in kinds or bool(_type_names(value) & kinds)
        if is_allowed and (kinds == {"json"} or not isinstance(value, str)):
            return text
    if kinds and "string" not in kinds and (literal := python_literal(text)) is not None:
        return literal  # templates write what is no string in Python's way, too
    return json.dumps(raw, ensure_ascii=False)


def _type_names(value: Any) -> frozenset[str]:
    """What JSON Schema calls the type of a value."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case None:
            return frozenset({"null"})
    return frozenset({"object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string"})


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, frozenset[str]]]:
    """The types of every tool's parameters, out of the tools of a request."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            found[str(function.get("name"))] = {str(key): _schema_types(value) for key, value in properties.items()}
    return found


def _schema_types(schema: Any) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list | tuple):
        return frozenset(str(item) for item in given)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list | tuple):
            each = [_schema_types(item) for item in schema[key]]
            return frozenset().union(*each) if each and all(each) else frozenset()
    if isinstance(schema.get("enum"), list | tuple):
        return frozenset().union(*(_type_names(item) for item in schema["enum"]))
    return frozenset()


class PythonReader(NamedReader):
    """`N(key=value, ...)`, each value handed out once it is whole."""

    def __init__(self, ends: Words) -> None:
        super().__init__("(", ends)
        self._quote = ""
        self._escaped = False
        self._depth = 0
        self._scanned = 0  # characters of the value that were looked at
        self._count = 0

    def _next_after_name(self) -> str:
        return "key"

    def _in_key(self, text: str, at: int) -> int:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] == ")":
            self.pieces.append("}" if self._count else "{}")
            self.begun = self.done = True
            return at + 1
        found = PYTHON_KEY.match(text, at)
        if found is None or found.end() == len(text) or found.end() - at > MAX_NAME_CHARS:
            rest = text[at:]
            self.failed = len(rest) > MAX_NAME_CHARS or not re.fullmatch(r"[^\W\d]\w*\s*(=\s*)?", rest)
            return at
        self.pieces.append(f"{', ' if self._count else '{'}{json.dumps(found[1], ensure_ascii=False)}: ")
        self.begun = True
        self._count += 1
        self._state = "value"
        return found.end()

    def _in_value(self, text: str, at: int) -> int:
        """Looks for the comma or bracket that ends the value, outside of quotes and inner brackets."""
        place = at + self._scanned
        while place < len(text):
            char = text[place]
            if self._quote:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif not self._depth and char in ",)":
                return self._take(text[at:place], text, place)
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
            place += 1
        self._scanned = place - at
        return at

    def _take(self, written: str, text: str, place: int) -> int:
        value = python_literal(written.strip())
        if value is None:
            self.failed = True
            return place
        self.pieces.append(value)
        self._scanned, self._state = 0, "key"
        return place + (text[place] == ",")


def python_literal(text: str) -> str | None:
    """The JSON text of a Python literal, or of JSON; None where it is neither."""
    if is_json(text):
        return text
    if len(text) > 1 and text[0] in "'\"" and text.find(text[0], 1) == len(text) - 1:
        text = text.replace("\n", "\\n").replace("\r", "\\r")  # quoted, but for line breaks
    try:
        value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return written if is_portable_json([json.loads(written)]) else None


class KeyValuesReader(NamedReader):
    """`N{key:QUOTEtextQUOTE,other:2}`: made into JSON piece by piece, which a scanner then checks."""

    def __init__(self, form: KeyValues, ends: Words) -> None:
        super().__init__("{", ends)
        self._quote = form.quote
        self._scanner = JsonScanner()
        self._objects: list[bool] = []

    def _next_after_name(self) -> str:
        self._objects.append(True)
        self._put("{")
        return "key"

    def _put(self, piece: str) -> None:
        """Hands out what goes on with valid JSON."""
        self._scanner.feed(piece)
        if self._scanner.pieces:
            self.begun = True
            self.pieces += self._scanner.pieces
            self._scanner.pieces.clear()
        self.done, self.failed = self._scanner.done, self._scanner.broken

    def _in_key(self, text: str, at: int) -> int:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at < len(text) and text[at] == "}":
            return self._close(at)
        end = text.find(":", at)
        if end < 0 or end - at > MAX_NAME_CHARS:
            self.failed = len(text) - at > MAX_NAME_CHARS
            return at
        key = text[at:end].strip()
        key = key.removeprefix(self._quote).removesuffix(self._quote)
        self._state = "value"
        self._put(json.dumps(key, ensure_ascii=False) + ":")
        return end + 1

    def _close(self, at: int) -> int:
        is_object = self._objects.pop()
        self._state = "next"
        self._put("}" if is_object else "]")
        return at + 1

    def _in_value(self, text: str, at: int) -> int:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        opened = match_words((self._quote,), text, at)
        if opened >= 0:
            self._state = "string"
            self._put('"')
            return opened
        if opened == MORE and self._quote.startswith(text[at:]):
            return at
        if text[at] in "{[":
            self._objects.append(text[at] == "{")
            self._state = "key" if text[at] == "{" else "value"
            self._put(text[at])
            return at + 1
        if text[at] == "]" and not self._objects[-1]:
            return self._close(at)
        end = next((n for n in range(at, len(text)) if text[n] in ",]}"), -1)
        if end < 0 or end - at > MAX_NAME_CHARS:
            self.failed = len(text) - at > MAX_NAME_CHARS
            return at
        word = PYTHON_WORDS.get(text[at:end].strip(), text[at:end].strip())
        if not is_json_word(word):
            self.failed = True
            return at
        self._put(word)
        self._state = "next"
        return end

    def _in_string(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        stop = end if end >= 0 else len(text) - held_back(text[at:], (self._quote,))
        if stop > at:
            self._put(escaped(text[at:stop]))
        if end < 0:
            return stop
        self._put('"')
        self._state = "next"
        return end + len(self._quote)

    def _in_next(self, text: str, at: int) -> int:
        at = ANY_SPACE.match(text, at).end()  # type: ignore[union-attr]
        if at == len(text):
            return at
        if text[at] in "}]":
            if text[at] != ("}" if self._objects[-1] else "]"):
                self.failed = True
                return at
            return self._close(at)
        if text[at] != ",":
            self.failed = True
            return at
        self._state = "key" if self._objects[-1] else "value"
        self._put(",")
        return at + 1


def reader_of(form: CallForm, types: ParameterTypes) -> Callable[[], BodyReader]:
    """What makes a reader for each call of a form."""
    body = form.body
    ends: Words = tuple(text.split()[0] for text in (form.close, form.end) if text.strip())
    match body:
        case JsonObject():
            return lambda: JsonObjectReader(body, bare=form.bare)
        case NamedArguments():
            return lambda: NamedArgumentsReader(body, ends)
        case Parameters():
            return lambda: ParametersReader(body, ends, types)
        case KeyValues():
            return lambda: KeyValuesReader(body, ends)
    return lambda: PythonReader(ends)
