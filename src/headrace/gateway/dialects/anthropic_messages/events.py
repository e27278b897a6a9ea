"""A message as Anthropic's events: its beginning, blocks that are opened, filled and closed one by one, and its end."""

from __future__ import annotations

from typing import Any

from headrace.data.json import to_json
from headrace.gateway.dialects.anthropic import error_body, event
from headrace.gateway.dialects.anthropic_messages.answer import ending_of, message, signature, tool_use, usage
from headrace.gateway.errors import Refusal
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import Delta, ToolCall

#: What an empty block of each kind is, and the delta that fills it.
EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageEvents:
    """One answer as events."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._blocks = Blocks(show_thinking=turn.ask.notes.show_thinking, one_call=turn.ask.one_call)

    def opening(self) -> bytes:
        begun = message(self._turn, [], {"stop_reason": None, "stop_sequence": None})
        return event({"type": "message_start", "message": begun}) + event({"type": "ping"})

    def delta(self, turn: Turn, choice: Choice, delta: Delta, piece: SampledChoice | None) -> bytes:
        return self._blocks.take(delta) if delta else b""

    def closing(self) -> bytes:
        (choice,) = self._turn.choices
        ending = {"type": "message_delta", "delta": ending_of(self._turn, choice), "usage": usage(self._turn)}
        return self._blocks.close() + event(ending) + event({"type": "message_stop"})

    def error(self, refusal: Refusal) -> bytes:
        return event(error_body(refusal))


class Blocks:
    """The blocks of one stream. White space is held back until text follows: a block of nothing else says nothing."""

    def __init__(self, *, show_thinking: bool, one_call: bool) -> None:
        self._show_thinking = show_thinking
        self._one_call = one_call
        self._next = 0
        self._open = ""  # the kind of the block that is being filled
        self._space = ""
        self._thoughts: list[str] = []
        self._called = False

    def take(self, delta: Delta) -> bytes:
        """The events for what is new."""
        out: list[bytes] = []
        if delta.reasoning:
            self._begin("thinking", out)
            self._thoughts.append(delta.reasoning)
            if self._show_thinking:
                out.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            text = self._space + delta.content
            if self._open == "text" or not text.isspace():
                self._begin("text", out)
                out.append(self._delta({"type": "text_delta", "text": text}))
                self._space = ""
            else:
                self._space = text
        for call in delta.tool_calls:
            if not (self._one_call and self._called):
                self._call(call, out)
        return b"".join(out)

    def close(self) -> bytes:
        """The end of the block that is open, if any."""
        out: list[bytes] = []
        self._end(out)
        return b"".join(out)

    def _begin(self, kind: str, out: list[bytes]) -> None:
        if self._open != kind:
            self._end(out)
            out.append(self._start(EMPTY[kind]))
            self._open = kind

    def _end(self, out: list[bytes]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            sign = signature("".join(self._thoughts), shown=self._show_thinking)
            out.append(self._delta({"type": "signature_delta", "signature": sign}))
            self._thoughts = []
        out.append(event({"type": "content_block_stop", "index": self._next}))
        self._open = ""
        self._next += 1

    def _call(self, call: ToolCall, out: list[bytes]) -> None:
        self._called = True
        self._end(out)
        self._open = "tool_use"
        block = tool_use(call)
        out.append(self._start({**block, "input": {}}))
        out.append(self._delta({"type": "input_json_delta", "partial_json": to_json(block["input"]).decode()}))
        self._end(out)

    def _start(self, block: dict[str, Any]) -> bytes:
        return event({"type": "content_block_start", "index": self._next, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._next, "delta": delta})
