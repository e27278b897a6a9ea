"""An answer as it was read so far: its parts, and what of them is new."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby

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
        self._new: list[AnswerDelta | CallDelta] = []

    def say(self, text: str) -> None:
        """More of the content."""
        self.content.append(text)
        self._new.append(AnswerDelta(text))

    def think(self, text: str) -> None:
        """More of the reasoning."""
        self.reasoning.append(text)
        self._new.append(AnswerDelta("", text))

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
        new, self._new = self._new, []
        if len(new) < 2:
            return _part(new[0]) if new else NOTHING
        return AnswerDelta(
            "".join(part.content for part in new if isinstance(part, AnswerDelta)),
            "".join(part.reasoning for part in new if isinstance(part, AnswerDelta)),
            tuple(_joined([part for part in new if isinstance(part, CallDelta)])),
        )

    def parts(self) -> list[AnswerDelta]:
        """What is new in the order in which it was written, each of one kind: content, reasoning or one call."""
        new, self._new = self._new, []
        if len(new) < 2:
            return [_part(new[0])] if new else []
        found: list[AnswerDelta] = []
        for _, same in groupby(new, _kind):
            those = list(same)
            if isinstance(those[0], CallDelta):
                calls = _joined([part for part in those if isinstance(part, CallDelta)])
                found += [AnswerDelta("", "", (call,)) for call in calls]
            else:
                said = [part for part in those if isinstance(part, AnswerDelta)]
                found.append(
                    AnswerDelta("".join(part.content for part in said), "".join(part.reasoning for part in said))
                )
        return found

    def parsed(self) -> Parsed:
        """All that was read."""
        return Parsed(
            "".join(self.content),
            "".join(self.reasoning) if self.thought else None,
            tuple(self.calls),
            tuple(self.malformed),
            self.cut,
        )


def _part(new: AnswerDelta | CallDelta) -> AnswerDelta:
    return AnswerDelta("", "", (new,)) if isinstance(new, CallDelta) else new


def _kind(new: AnswerDelta | CallDelta) -> str:
    return "call" if isinstance(new, CallDelta) else "content" if new.content else "reasoning"


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
