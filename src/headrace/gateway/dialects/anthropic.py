"""What Anthropic's routes answer: a message of content blocks, its events, and errors.

A message streamed is the same as one answered whole: blocks are opened, filled and closed one by one.
"""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any

import msgspec
import orjson

from headrace.data.json import to_json
from headrace.gateway.dialects.shared import seal
from headrace.gateway.errors import Refusal
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta, CallDelta, ToolCall
from headrace.tokens.messages import read_arguments
from headrace.tokens.partial_json import begun_object

#: Anthropic's `type` of an error, by status. What is not here is the caller's fault below 500, and ours above.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The words by which agents know that they must shorten the conversation.
TOO_LONG_PREFIX = "prompt is too long: "


def headers(call_id: str) -> dict[str, str]:
    """The header in which Anthropic's SDKs look for a call's id."""
    return {"request-id": f"req_{call_id}"}


def error_body(refusal: Refusal) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    said = f"{TOO_LONG_PREFIX if refusal.reason == 'context_length_exceeded' else ''}{refusal}"
    return {"type": "error", "error": {"type": kind, "message": said}}


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event, named by its `type`."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))


Json = dict[str, Any]

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
#: Bytes of the digest that stands for reasoning which is shown: enough that no two thoughts share one.
SIGNATURE_BYTES = 16
#: The one key under which a call's arguments are shown that are no JSON object, as Anthropic's must be.
RAW_ARGUMENTS = "_raw"


class MessagesNotes(msgspec.Struct, frozen=True):
    """Whether an answer shows its reasoning, or only its signature."""

    show_thinking: bool


def message_body(turn: Turn, content: list[Json], ending: Json) -> Json:
    """The message object with this content and ending; `ending_of` gives the ending."""
    head = {"id": f"msg_{turn.call_id}", "type": "message", "role": "assistant", "model": turn.request.model}
    return {**head, "content": content, **ending, "usage": usage(turn)}


def content_of(turn: Turn, choice: Choice) -> list[Json]:
    """The content blocks of an answer; a text of nothing but white space is left out."""
    said = choice.message()
    blocks: list[Json] = []
    if said.reasoning:
        shown: bool = turn.request.dialect_notes.show_thinking
        sign = signature(said.reasoning, shown=shown)
        blocks.append({"type": "thinking", "thinking": said.reasoning if shown else "", "signature": sign})
    if said.content and not said.content.isspace():
        blocks.append({"type": "text", "text": said.content})
    return blocks + [tool_use(call) for call in said.tool_calls]


def tool_use(call: ToolCall) -> Json:
    """A call as a block. Anthropic's arguments are an object, whatever the model wrote; of arguments that broke off,
    what SDKs keep of them in a stream."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: Any) -> Json:
    if isinstance(arguments, dict):
        return arguments
    begun = begun_object(arguments) if isinstance(arguments, str) else None
    return {RAW_ARGUMENTS: arguments} if begun is None else begun


def signature(thought: str, *, shown: bool) -> str:
    """The signature of a thinking block: a digest where the reasoning is shown, else the reasoning itself, sealed:
    the signature is then all of it that an agent sends back."""
    if not shown:
        return seal(thought)
    data = thought.encode("utf-8", "surrogatepass")
    return base64.b64encode(blake2b(data, digest_size=SIGNATURE_BYTES).digest()).decode()


def ending_of(turn: Turn, choice: Choice) -> Json:
    """`stop_reason` and `stop_sequence` of an answer."""
    matched = choice.sampled.stop_reason if choice.sampled is not None else None
    if isinstance(matched, str) and matched in turn.upstream_request.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def usage(turn: Turn) -> dict[str, int]:
    """Anthropic's usage. The whole prompt counts as input: nothing is known of a rollout server's cache."""
    return {
        "input_tokens": len(turn.plan.ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sum(len(choice.ids) for choice in turn.choices),
    }


#: What an empty block of each kind is, and the delta that fills it.
EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageEvents:
    """Writes one answer as Anthropic's events."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._blocks = BlockEvents(show_thinking=turn.request.dialect_notes.show_thinking)

    def opening(self) -> bytes:
        begun = message_body(self._turn, [], {"stop_reason": None, "stop_sequence": None})
        return event({"type": "message_start", "message": begun}) + event({"type": "ping"})

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        return self._blocks.take(delta) if delta else b""

    def closing(self) -> bytes:
        (choice,) = self._turn.choices
        ending = {"type": "message_delta", "delta": ending_of(self._turn, choice), "usage": usage(self._turn)}
        return self._blocks.close() + event(ending) + event({"type": "message_stop"})

    def error(self, refusal: Refusal) -> bytes:
        return event(error_body(refusal))


class BlockEvents:
    """Writes the blocks of one stream. White space is held back until text follows: no block is white space alone."""

    def __init__(self, *, show_thinking: bool) -> None:
        self._show_thinking = show_thinking
        self._next = 0
        self._open = ""  # the kind of the block that is being filled
        self._space = ""
        self._thoughts: list[str] = []
        self._call = -1  # the number of the call that is being filled, or was last
        self._held = ""  # its arguments, until they are known to be an object
        self._in_object = False

    def take(self, delta: AnswerDelta) -> bytes:
        """The events for what is new. What is new of the open call was written before all else."""
        out: list[bytes] = []
        calls = list(delta.tool_calls)
        if calls and self._open == "tool_use" and calls[0].index == self._call:
            self._grow_call(calls.pop(0).arguments, out)
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
        for call in calls:
            self._begin_call(call, out)
        return b"".join(out)

    def close(self) -> bytes:
        """The end of the block that is open, if any."""
        out: list[bytes] = []
        self._end(out)
        return b"".join(out)

    def _begin(self, kind: str, out: list[bytes]) -> None:
        if self._open != kind:
            self._end(out)
            out.append(self._start(EMPTY_BLOCKS[kind]))
            self._open = kind

    def _end(self, out: list[bytes]) -> None:
        if not self._open:
            return
        if self._open == "thinking":
            sign = signature("".join(self._thoughts), shown=self._show_thinking)
            out.append(self._delta({"type": "signature_delta", "signature": sign}))
            self._thoughts = []
        if self._open == "tool_use":
            self._end_call(out)
        out.append(event({"type": "content_block_stop", "index": self._next}))
        self._open = ""
        self._next += 1

    def _begin_call(self, new: CallDelta, out: list[bytes]) -> None:
        self._end(out)
        self._open, self._call, self._held = "tool_use", new.index, ""
        out.append(self._start({"type": "tool_use", "id": new.id, "name": new.name, "input": {}}))
        self._grow_call(new.arguments, out)

    def _grow_call(self, text: str, out: list[bytes]) -> None:
        """Adds to the arguments. Those that are no object are held back to their end, and told as one there."""
        self._held += text
        if self._in_object or self._held.lstrip().startswith("{"):
            self._in_object = True
            self._tell_arguments(self._held, out)
            self._held = ""

    def _end_call(self, out: list[bytes]) -> None:
        if self._held.strip():
            self._tell_arguments(to_json(_input(read_arguments(self._held))).decode(), out)
        self._held, self._in_object = "", False

    def _tell_arguments(self, text: str, out: list[bytes]) -> None:
        if text:
            out.append(self._delta({"type": "input_json_delta", "partial_json": text}))

    def _start(self, block: dict[str, Any]) -> bytes:
        return event({"type": "content_block_start", "index": self._next, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._next, "delta": delta})
