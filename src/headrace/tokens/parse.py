"""A sampled answer's text into content, reasoning and tool calls, as it arrives.

There is one parser, and it streams: a whole answer is parsed by feeding it at once. So what a streaming agent puts
together from the deltas is what the others get. Nothing sampled disappears: a tool call that cannot be read is content,
as it was written, and is named in `malformed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from headrace.tokens.messages import Message, ToolCall, read_arguments

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CallFormat = Literal["none", "hermes", "mistral", "llama"]
#: What opens a call and, where there is such a thing, closes it.
CALL_OPENERS: dict[str, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama": "<|python_tag|>"}
HERMES_END = "</tool_call>"

NewId = Callable[[int], str]


class Grammar(msgspec.Struct, frozen=True):
    """How a family writes reasoning and tool calls."""

    reasoning: bool = False
    calls: CallFormat = "none"

    @property
    def markers(self) -> tuple[str, ...]:
        """What must be visible in the text even where the vocabulary calls it special."""
        thought = (THINK_OPEN, THINK_CLOSE) if self.reasoning else ()
        made = (CALL_OPENERS[self.calls],) if self.calls != "none" else ()
        return thought + made + ((HERMES_END,) if self.calls == "hermes" else ())


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one tool call. `id` and `name` come once, in the call's first delta; `arguments` is JSON text to
    append."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class AnswerDelta(msgspec.Struct, frozen=True):
    """What is new of an answer: text to append, and what is new of its calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class Parsed(msgspec.Struct, frozen=True):
    """A whole answer. `cut` names what was still open at its end; `malformed` holds calls that could not be read."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    cut: Literal["", "reasoning", "tool_call"] = ""

    @property
    def message(self) -> Message:
        """The answer as a message."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


class AnswerParser:
    """Text in, deltas out; `finish` gives the last delta, then `parsed` is the whole.

    `thinking`: the prompt already opened the reasoning. Without `tools` nothing is a call: an answer in JSON to an
    agent that offered no tools is its content.
    """

    def __init__(self, grammar: Grammar, *, tools: bool, thinking: bool = False, new_id: NewId) -> None:
        self._calls: CallFormat = grammar.calls if tools else "none"
        self._opener = CALL_OPENERS.get(self._calls, "")
        self._new_id = new_id
        self._buffer = ""
        self._state = "reasoning" if thinking else "start" if grammar.reasoning else "first"
        self._trim = "\n" if thinking else ""  # what is dropped before the next visible character
        self._space = ""  # white space that only counts if text follows
        self._open = ""  # the call being read, opener included
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._thought = thinking
        self._made: list[ToolCall] = []
        self._malformed: list[str] = []
        self._cut: Literal["", "reasoning", "tool_call"] = ""
        self._sent = (0, 0, 0)

    def feed(self, text: str) -> AnswerDelta:
        """Takes the next text; what is new of the answer. A text that may still become a marker is held back."""
        self._buffer += text
        while self._advance(last=False):
            pass
        return self._delta()

    def finish(self) -> AnswerDelta:
        """Ends the answer; what was held back of it, and what was left open."""
        while self._advance(last=True):
            pass
        self._finish_open()
        if self._space:
            self._content.append(self._space)
            self._space = ""
        return self._delta()

    @property
    def parsed(self) -> Parsed:
        """The answer as far as it was read; whole after `finish`."""
        return Parsed(
            "".join(self._content),
            "".join(self._reasoning) if self._thought else None,
            tuple(self._made),
            tuple(self._malformed),
            self._cut,
        )

    def _delta(self) -> AnswerDelta:
        content, reasoning, made = self._sent
        self._sent = (len(self._content), len(self._reasoning), len(self._made))
        new = tuple(
            CallDelta(made + i, call.id, call.name, call.arguments_text) for i, call in enumerate(self._made[made:])
        )
        return AnswerDelta("".join(self._content[content:]), "".join(self._reasoning[reasoning:]), new)

    def _advance(self, *, last: bool) -> bool:
        """One step of the state machine; False where it needs more text, or at the `last` is done."""
        return bool(getattr(self, "_in_" + self._state)(last))

    def _in_start(self, last: bool) -> bool:
        """Before the first visible character: only here may reasoning begin."""
        begun = self._buffer.lstrip()
        if begun.startswith(THINK_OPEN):
            self._buffer, self._state, self._trim, self._thought = begun[len(THINK_OPEN) :], "reasoning", "\n", True
            return True
        if THINK_OPEN.startswith(begun) and not last:
            return False
        self._state = "first"
        return True

    def _in_reasoning(self, last: bool) -> bool:
        end = self._buffer.find(THINK_CLOSE)
        # A call that begins while reasoning is open ends it, but only if nothing else does.
        call = self._buffer.find(self._opener) if self._calls == "hermes" else -1
        if end >= 0:
            self._think(self._buffer[:end])
            self._buffer, self._state, self._trim, self._space = (
                self._buffer[end + len(THINK_CLOSE) :],
                "first",
                "\n",
                "",
            )
            return True
        if call >= 0:
            self._think(self._buffer[:call])
            self._buffer = self._buffer[call:]
            if last:
                self._state, self._trim, self._space = "content", "", ""
            return last
        keep = 0 if last else _partial(self._buffer, (THINK_CLOSE, self._opener if self._calls == "hermes" else ""))
        self._think(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        if last:
            self._cut, self._state, self._space = "reasoning", "done", ""
        return last

    def _think(self, text: str) -> None:
        text = self._trimmed(text)
        body = text.rstrip("\n")
        if body:
            self._reasoning.append(self._space + body)
            self._space = ""
        self._space += text[len(body) :]

    def _in_first(self, last: bool) -> bool:
        """The content's beginning: only here does a bare JSON object mean a call (Llama)."""
        if self._calls == "llama":
            begun = self._buffer.lstrip()
            if begun.startswith(("{", self._opener)):
                self._state = "held"
                return True
            if self._opener.startswith(begun) and not last:
                return False
        self._state = "content"
        return True

    def _in_content(self, last: bool) -> bool:
        at = self._buffer.find(self._opener) if self._opener and self._calls != "llama" else -1
        if at >= 0:
            self._say(self._buffer[:at])
            self._open, self._buffer = self._opener, self._buffer[at + len(self._opener) :]
            self._state = "call" if self._calls == "hermes" else "held"
            return True
        keep = 0 if last else _partial(self._buffer, (self._opener,))
        self._say(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        if last:
            self._state = "done"
        return last

    def _say(self, text: str) -> None:
        text = self._trimmed(text)
        # White space before a call is layout; whether a call follows is not known yet.
        body = text.rstrip() if self._calls in ("hermes", "mistral") else text
        if body:
            self._content.append(self._space + body)
            self._space = ""
        self._space += text[len(body) :]

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip(self._trim)
            if text:
                self._trim = ""
        return text

    def _in_call(self, last: bool) -> bool:
        end = self._buffer.find(HERMES_END)
        if end < 0:
            return False
        body, self._buffer = self._buffer[:end], self._buffer[end + len(HERMES_END) :]
        call = _hermes(body)
        if call is None:
            self._unread(self._open + body + HERMES_END)
        else:
            self._add(call)
            self._space, self._trim = "", " \t\r\n"
        self._open, self._state = "", "content"
        return True

    def _in_held(self, last: bool) -> bool:
        return False  # such a call has no end but the answer's

    def _in_done(self, last: bool) -> bool:
        return False

    def _finish_open(self) -> None:
        """A call that is still open when the answer ends: read if it can be read, else content."""
        if self._state == "call":
            call = _hermes(self._buffer)
            made = None if call is None else [call]
        elif self._state == "held":
            made = _mistral(self._buffer) if self._calls == "mistral" else _llama(self._buffer)
        else:
            return
        text, self._buffer = self._open + self._buffer, ""
        if made is not None:
            for call in made:
                self._add(call)
            self._space = ""
        elif self._calls == "llama" and not text.lstrip().startswith(self._opener):
            self._say(text)  # JSON that is no call is an answer
        else:
            self._unread(text)
            self._cut = "tool_call"
        self._state = "done"

    def _add(self, call: ToolCall) -> None:
        number = len(self._made)
        self._made.append(call if call.id else ToolCall(call.name, call.arguments, self._new_id(number)))

    def _unread(self, text: str) -> None:
        self._malformed.append(text)
        self._content.append(self._space + text)
        self._space = ""


def _partial(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    most = 0
    for marker in markers:
        for n in range(min(len(marker) - 1, len(text)), most, -1):
            if text.endswith(marker[:n]):
                most = n
                break
    return most


def _load(text: str) -> Any:
    """JSON, or None; NaN and Infinity are no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _as_call(value: Any, *names: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = read_arguments(next((value[name] for name in names if name in value), {}))
    call_id = value.get("id")
    if not is_portable_json([value["name"], arguments, call_id]):
        return None
    return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else "")


def _hermes(body: str) -> ToolCall | None:
    return _as_call(_load(body.strip()), "arguments", "parameters")


def _mistral(body: str) -> list[ToolCall] | None:
    value = _load(body.strip())
    calls = [_as_call(item, "arguments", "parameters") for item in (value if isinstance(value, list) else [value])]
    return None if not calls or None in calls else [call for call in calls if call is not None]


def _llama(body: str) -> list[ToolCall] | None:
    text = body.strip().removeprefix(CALL_OPENERS["llama"]).strip()
    decoder = json.JSONDecoder(parse_constant=_refuse)
    calls: list[ToolCall] = []
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        call = _as_call(value, "parameters", "arguments")
        if call is None or not ({"parameters", "arguments"} & value.keys()):
            return None
        calls.append(call)
        text = text[end:].lstrip(" \t\r\n;")
    return calls or None


class StopCut:
    """Text up to the first of the stop strings, as it arrives; what may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._buffer = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that certainly stands before the first stop string."""
        if not self._stops:
            return text
        if self.stopped:
            return ""
        self._buffer += text
        found = [at for at in (self._buffer.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            out, self._buffer = self._buffer[: min(found)], ""
            return out
        keep = _partial(self._buffer, self._stops)
        out, self._buffer = self._buffer[: len(self._buffer) - keep], self._buffer[len(self._buffer) - keep :]
        return out

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        out, self._buffer = self._buffer, ""
        return out


#: Levels that a call's arguments may nest: JSON libraries recurse, and give up at some hundreds.
MAX_NESTING = 100


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
