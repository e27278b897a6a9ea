"""A turn as OpenAI's response object, whole or as events.

Its output is items: reasoning, text and calls. In a stream they open, grow and are done one after the other, each event
with its number. An item's id tells the call that gave it, so that a later request may refer to an item by its id alone.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

import msgspec

from headrace.data.json import to_json
from headrace.gateway.dialects import openai
from headrace.gateway.dialects.shared import seal
from headrace.gateway.errors import Refusal
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta, CallDelta, ToolCall

ItemKind = Literal["rs", "msg", "fc"]

#: Call ids are hexadecimal; no answer has a million items.
_NAME = re.compile(r"(rs|msg|fc)_([0-9a-f]+)(?:_([0-9]{1,6}))?")


class ItemName(msgspec.Struct, frozen=True):
    """Reasoning (`rs`), a text (`msg`) or a function call (`fc`) of the answer that `call` got."""

    kind: ItemKind
    call: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}_{self.call}" + (f"_{self.number}" if self.number or self.kind == "fc" else "")

    @classmethod
    def read(cls, given: str) -> Self | None:
        """Parses an item's id; None for what is none."""
        found = _NAME.fullmatch(given)
        if found is None:
            return None
        name = cls(found[1], found[2], int(found[3] or 0))  # type: ignore[arg-type]
        return name if str(name) == given else None


Json = dict[str, Any]

RESPONSE_ID_PREFIX = "resp_"


class ResponsesNotes(msgspec.Struct, frozen=True):
    """The fields of the request that the answer repeats, its tools' namespaces, whether reasoning is sealed too."""

    echo: Json
    namespaces: frozenset[str]
    seal: bool


def response(turn: Turn, status: str, output: list[Json], **more: Any) -> Json:
    """The response object with this status and output; `more` replaces fields."""
    request, sampling = turn.request, turn.upstream_request.sampling
    return {
        "id": RESPONSE_ID_PREFIX + turn.call_id,
        "object": "response",
        "created_at": turn.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": not request.single_tool_call,
        "previous_response_id": None if request.previous is None else RESPONSE_ID_PREFIX + request.previous,
        "store": request.store,
        "temperature": sampling.get("temperature"),
        "top_p": sampling.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        **request.dialect_notes.echo,
        **more,
    }


def ended(turn: Turn, output: list[Json]) -> Json:
    """The response object of an answer that has ended: completed, or incomplete at its limit of tokens."""
    (choice,) = turn.choices
    more: Json = {"usage": _usage(turn, choice)}
    if turn.request.return_token_ids:
        more |= {"prompt_token_ids": turn.plan.ids.tolist(), "token_ids": choice.ids}
    if is_cut(choice):
        return response(turn, "incomplete", output, incomplete_details={"reason": "max_output_tokens"}, **more)
    return response(turn, "completed", output, **more)


def is_cut(choice: Choice) -> bool:
    """Whether an answer ended at its limit of tokens."""
    return choice.finish_reason == "length"


def output_of(turn: Turn) -> list[Json]:
    """The output items of a whole answer: reasoning, text and calls."""
    (choice,) = turn.choices
    message = choice.message()
    items: list[Json] = []
    if message.reasoning:
        items.append(reasoning_item(turn, 0, message.reasoning))
    if message.content or not (items or message.tool_calls):
        logprobs = (
            [] if turn.request.top_logprobs is None else openai.token_entries(choice, 0, turn.request.top_logprobs)
        )
        items.append(text_item(turn, 0, message.content, logprobs))
    items += [
        call_item(turn, number, call, "completed" if call.whole else "incomplete")
        for number, call in enumerate(message.tool_calls)
    ]
    if is_cut(choice) and not message.tool_calls:
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(turn: Turn, number: int, text: str, status: str = "completed") -> Json:
    """The item of an answer's reasoning, or of part `number` of it where text came between; sealed too where the
    request asks for it."""
    parts = [reasoning_part(text)] if status != "in_progress" else []
    name = str(ItemName("rs", turn.call_id, number))
    item: Json = {"id": name, "type": "reasoning", "status": status, "summary": [], "content": parts}
    if turn.request.dialect_notes.seal and parts:
        item["encrypted_content"] = seal(text)
    return item


def text_item(turn: Turn, number: int, text: str, logprobs: list[Json], status: str = "completed") -> Json:
    """The item of an answer's text, or of part `number` of it where calls or reasoning came between."""
    parts = [text_part(text, logprobs)] if status != "in_progress" else []
    name = str(ItemName("msg", turn.call_id, number))
    return {"id": name, "type": "message", "status": status, "role": "assistant", "content": parts}


def call_item(turn: Turn, number: int, call: ToolCall, status: str = "completed") -> Json:
    """The item of one tool call; a function of a namespace is named by both again."""
    space, dot, name = call.name.partition(".")
    within = bool(dot) and space in turn.request.dialect_notes.namespaces
    return {
        "id": str(ItemName("fc", turn.call_id, number)),
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        **({"namespace": space} if within else {}),
        "name": name if within else call.name,
        "arguments": call.arguments_text if status != "in_progress" else "",
    }


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(turn: Turn, choice: Choice) -> Json:
    asked, answered = len(turn.plan.ids), len(choice.ids)
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answered,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": asked + answered,
    }


class ResponseEvents:
    """The events of one response. At most one item is open: the last of the output, while `_open` names its type."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._number = 0
        self._output: list[Json] = []
        self._open = ""
        self._pieces: list[str] = []  # the open item's text
        self._thoughts = self._texts = 0
        self._call = -1  # the number of the call that is open, or was last
        self._told = 0  # tokens whose log-probs were said
        self._since = 0  # the first of them in the open item

    def opening(self) -> bytes:
        begun = response(self._turn, "in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        out, calls = b"", list(delta.tool_calls)
        if calls and self._open == "function_call" and calls[0].index == self._call:
            out += self._grow_call(calls.pop(0).arguments)  # it was written before all else that is new
        if delta.reasoning:
            out += self._begin("reasoning") + self._grow("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            out += self._begin("message")
            out += self._grow("response.output_text.delta", delta.content, logprobs=self._logprobs(choice))
        for call in calls:
            out += self._begin_call(call)
        return out

    def closing(self) -> bytes:
        (choice,) = self._turn.choices
        cut = is_cut(choice)
        out = b"" if self._output else self._begin("message")
        out += self._end("incomplete" if cut else "completed")
        found = ended(self._turn, self._output)
        return out + self._event(f"response.{found['status']}", response=found)

    def error(self, refusal: Refusal) -> bytes:
        said = {"code": refusal.reason, "message": str(refusal)}
        begun = self._number > 0
        out = self._event("error", **said, param=refusal.param)
        if begun:
            failed = response(self._turn, "failed", self._output, error={**said, "code": "server_error"})
            out += self._event("response.failed", response=failed)
        return out

    def _begin(self, kind: str) -> bytes:
        """Opens an item of text, unless it is open."""
        if self._open == kind:
            return b""
        out, turn = self._end(), self._turn
        if kind == "reasoning":
            item, part = reasoning_item(turn, self._thoughts, "", "in_progress"), reasoning_part("")
        else:
            item, part = text_item(turn, self._texts, "", [], "in_progress"), text_part("", [])
        self._open, self._pieces, self._since = kind, [], self._told
        self._output.append(item)
        at: Json = {"item_id": item["id"], "output_index": len(self._output) - 1, "content_index": 0}
        out += self._event("response.output_item.added", output_index=at["output_index"], item=item)
        return out + self._event("response.content_part.added", **at, part=part)

    def _grow(self, kind: str, text: str, **more: Any) -> bytes:
        self._pieces.append(text)
        return self._event(kind, **self._place(), delta=text, **more)

    def _end(self, status: str = "completed") -> bytes:
        """The events that end the open item; none where no item is open."""
        if not self._open:
            return b""
        if self._open == "function_call":
            return self._end_call()
        text, turn, at = "".join(self._pieces), self._turn, self._place()
        if self._open == "reasoning":
            item, part = reasoning_item(turn, self._thoughts, text, status), reasoning_part(text)
            out = self._event("response.reasoning_text.done", **at, text=text)
            self._thoughts += 1
        else:
            logprobs = self._entries(turn.choices[0], self._since)
            item, part = text_item(turn, self._texts, text, logprobs, status), text_part(text, logprobs)
            out = self._event("response.output_text.done", **at, text=text, logprobs=logprobs)
            self._texts += 1
        self._output[-1], self._open = item, ""
        out += self._event("response.content_part.done", **at, part=part)
        return out + self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _begin_call(self, new: CallDelta) -> bytes:
        out = self._end()
        item = call_item(self._turn, new.index, ToolCall(new.name, {}, new.id), "in_progress")
        self._open, self._call = "function_call", new.index
        self._output.append(item)
        out += self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)
        return out + self._grow_call(new.arguments)

    def _grow_call(self, text: str) -> bytes:
        return self._event("response.function_call_arguments.delta", **self._item_place(), delta=text) if text else b""

    def _end_call(self) -> bytes:
        """The events that end the open call, whole as it was read or broken off."""
        call, at = self._turn.choices[0].call(self._call), self._item_place()
        item = call_item(self._turn, self._call, call, "completed" if call.whole else "incomplete")
        self._output[-1], self._open = item, ""
        said = {"name": item["name"], "arguments": item["arguments"]}
        out = self._event("response.function_call_arguments.done", **at, **said)
        return out + self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _item_place(self) -> Json:
        """The fields that name the open item in an event."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _place(self) -> Json:
        """The fields that name the open item's one part in an event."""
        return {**self._item_place(), "content_index": 0}

    def _logprobs(self, choice: Choice) -> list[Json]:
        entries = self._entries(choice, self._told)
        self._told = len(choice.ids)
        return entries

    def _entries(self, choice: Choice, since: int) -> list[Json]:
        top_logprobs = self._turn.request.top_logprobs
        return [] if top_logprobs is None else openai.token_entries(choice, since, top_logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
