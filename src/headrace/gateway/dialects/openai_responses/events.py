"""A response as it comes: items open, grow and are done one after the other, each event with its number."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.gateway.dialects import openai
from headrace.gateway.dialects.openai_responses.answer import (
    Json,
    call_item,
    ended,
    is_cut,
    reasoning_item,
    reasoning_part,
    response,
    text_item,
    text_part,
)
from headrace.gateway.errors import Refusal
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import Delta, ToolCall


class ResponseEvents:
    """The events of one response. At most one item is open: the last of the output, while `_open` names its type."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._number = 0
        self._output: list[Json] = []
        self._open = ""
        self._pieces: list[str] = []  # the open item's text
        self._texts = 0
        self._calls = 0
        self._told = 0  # tokens whose log-probs were said
        self._since = 0  # the first of them in the open item

    def opening(self) -> bytes:
        begun = response(self._turn, "in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, turn: Turn, choice: Choice, delta: Delta, piece: SampledChoice | None) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._begin("reasoning") + self._grow("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            out += self._begin("message")
            out += self._grow("response.output_text.delta", delta.content, logprobs=self._logprobs(choice))
        calls = delta.tool_calls[: max(0, 1 - self._calls)] if turn.ask.one_call else delta.tool_calls
        for call in calls:
            out += self._end() + self._call(call)
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
            item, part = reasoning_item(turn, "", "in_progress"), reasoning_part("")
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
        """The open item is done, where there is one."""
        if not self._open:
            return b""
        text, turn, at = "".join(self._pieces), self._turn, self._place()
        if self._open == "reasoning":
            item, part = reasoning_item(turn, text, status), reasoning_part(text)
            out = self._event("response.reasoning_text.done", **at, text=text)
        else:
            logprobs = self._entries(turn.choices[0], self._since)
            item, part = text_item(turn, self._texts, text, logprobs, status), text_part(text, logprobs)
            out = self._event("response.output_text.done", **at, text=text, logprobs=logprobs)
            self._texts += 1
        self._output[-1], self._open = item, ""
        out += self._event("response.content_part.done", **at, part=part)
        return out + self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _call(self, call: ToolCall) -> bytes:
        item = call_item(self._turn, self._calls, call)
        begun = call_item(self._turn, self._calls, call, "in_progress")
        self._calls += 1
        self._output.append(item)
        index, written = len(self._output) - 1, item["arguments"]
        at: Json = {"item_id": item["id"], "output_index": index}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event("response.function_call_arguments.delta", **at, delta=written),
                self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=written),
                self._event("response.output_item.done", output_index=index, item=item),
            )
        )

    def _place(self) -> Json:
        """Where the open item's text goes."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _logprobs(self, choice: Choice) -> list[Json]:
        entries = self._entries(choice, self._told)
        self._told = len(choice.ids)
        return entries

    def _entries(self, choice: Choice, since: int) -> list[Json]:
        tops = self._turn.ask.tops
        return [] if tops is None else openai.token_entries(choice, since, tops)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
