"""What agents say in each dialect, and how they read what comes back: bodies in, an answer's text out.

An answer counts as given when its end has been read: a whole body, or the last event of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec
import orjson

Dialect = Literal["chat", "completions", "responses", "messages"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

MAX_TOKENS = 96
PATHS: dict[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


class PastTurn(msgspec.Struct, frozen=True):
    """One turn of a conversation that went before: what was asked, and what was answered."""

    question: str
    answer: str


class Broken(Exception):
    """An answer that ended before its end, or with an error in its stream."""


def body_of(dialect: Dialect, history: Sequence[PastTurn], question: str, *, stream: bool) -> dict[str, Any]:
    """A call's body: a question behind the turns that went before. Text completions have no turns."""
    shared: dict[str, Any] = {"model": "any", "stream": stream}
    if dialect == "completions":
        return {**shared, "prompt": question, "max_tokens": MAX_TOKENS}
    messages: list[dict[str, str]] = []
    for turn in history:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": question})
    if dialect == "responses":
        return {**shared, "input": messages, "max_output_tokens": MAX_TOKENS, "store": False}
    return {**shared, "messages": messages, "max_tokens": MAX_TOKENS}


def whole_text(dialect: Dialect, body: bytes) -> str:
    """The text of an answer that came in one piece. Raises `Broken` for anything else."""
    try:
        answer = orjson.loads(body)
        match dialect:
            case "chat":
                return str(answer["choices"][0]["message"]["content"])
            case "completions":
                return str(answer["choices"][0]["text"])
            case "responses":
                parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
                return "".join(part["text"] for part in parts)
            case "messages":
                return "".join(part["text"] for part in answer["content"] if part["type"] == "text")
    except (KeyError, IndexError, TypeError, orjson.JSONDecodeError) as error:
        raise Broken(f"no answer of {dialect}: {body[:200]!r}") from error


class StreamReader:
    """Reads a stream as it comes: `feed` it bytes; `text` is what was said, `ended` whether its last event was read."""

    def __init__(self, dialect: Dialect) -> None:
        self.text = ""
        self.ended = False
        self._rest = b""
        self._take: Callable[[dict[str, Any]], None] = getattr(self, f"_{dialect}")

    def feed(self, data: bytes) -> None:
        """Raises `Broken` where the stream tells an error."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            said = line[6:].strip()
            if said == b"[DONE]":
                self.ended = True
                continue
            event = orjson.loads(said)
            if event.get("error") or event.get("type") in ("error", "response.failed"):
                raise Broken(said[:300].decode(errors="replace"))
            self._take(event)

    def _chat(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            self.text += choice["delta"].get("content") or ""

    def _completions(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            self.text += choice.get("text") or ""

    def _responses(self, event: dict[str, Any]) -> None:
        if event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        self.ended = self.ended or event["type"] in ("response.completed", "response.incomplete")

    def _messages(self, event: dict[str, Any]) -> None:
        if event["type"] == "content_block_delta":
            self.text += event["delta"].get("text", "")
        self.ended = self.ended or event["type"] == "message_stop"
