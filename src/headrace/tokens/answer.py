"""An answer as it was read so far: its parts, and what of them is new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec

from headrace.tokens.forms import CutPart
from headrace.tokens.messages import Message, ToolCall

#: Makes the id of an answer's tool call by its number.
NewId = Callable[[int], str]


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


NOTHING = AnswerDelta()


class Parsed(msgspec.Struct, frozen=True):
    """A whole answer. `cut` names what was still open at its end; `malformed` holds the text of calls that could not be
    read to their end."""

    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    cut: CutPart = ""

    @property
    def message(self) -> Message:
        """The answer as a message."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


class AnswerSoFar:
    """What was read of an answer, and what of it is new since the last delta."""

    def __init__(self, new_id: NewId) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.thought = False
        self.calls: list[ToolCall] = []
        self.malformed: list[str] = []
        self.cut: CutPart = ""
        self._new_id = new_id
        self._written: list[str] = []  # the arguments of the call that is being read
        self._new: list[CallDelta] = []
        self._sent = (0, 0)

    def open_call(self, name: str, call_id: str) -> None:
        """Begins a call; it is the last until `close_call`."""
        call = ToolCall(name, {}, call_id or self._new_id(len(self.calls)))
        self._new.append(CallDelta(len(self.calls), call.id, name))
        self.calls.append(call)
        self._written.clear()

    def add_arguments(self, pieces: Sequence[str]) -> None:
        """More of the last call's arguments."""
        self._written += pieces
        self._new.append(CallDelta(len(self.calls) - 1, arguments="".join(pieces)))

    def close_call(self, *, whole: bool) -> None:
        """Ends the last call; one that is not whole keeps the text of its arguments."""
        call, written = self.calls[-1], "".join(self._written)
        arguments = json.loads(written) if whole else written
        self.calls[-1] = ToolCall(call.name, arguments, call.id, written)

    def delta(self) -> AnswerDelta:
        """What is new."""
        content, reasoning = self._sent
        self._sent = (len(self.content), len(self.reasoning))
        calls: tuple[CallDelta, ...] = ()
        if self._new:
            calls = tuple(_joined(self._new))
            self._new = []
        if content == len(self.content) and reasoning == len(self.reasoning) and not calls:
            return NOTHING
        return AnswerDelta("".join(self.content[content:]), "".join(self.reasoning[reasoning:]), calls)

    def parsed(self) -> Parsed:
        """All that was read."""
        return Parsed(
            "".join(self.content),
            "".join(self.reasoning) if self.thought else None,
            tuple(self.calls),
            tuple(self.malformed),
            self.cut,
        )


def _joined(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Deltas of which those of one call are one."""
    found: list[CallDelta] = []
    for delta in deltas:
        if found and found[-1].index == delta.index:
            last = found[-1]
            found[-1] = CallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found
