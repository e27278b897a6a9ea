"""A request, an answer and a dialect's client, as the checks see them, whichever dialect they travel in.

The clients are written here and not taken from the vendors' SDKs: a check must see an answer and each event as they
came, malformed ones too, which an SDK hides or refuses, and with fields that no SDK knows; and `check-gateway` must run
where no SDK is installed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import orjson

Json = dict[str, Any]

#: The data of the event that ends a stream of OpenAI's.
STREAM_END = b"[DONE]"

#: The tool that a model is offered. Models know this one well.
TOOL_NAME = "add"
TOOL_DESCRIPTION = "Adds."
TOOL_PARAMETERS: Json = {
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "type": "object",
}


class Malformed(Exception):
    """An answer that is not of its dialect's shape: what is wrong with it."""


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """One request: a history in the dialect's own items, and how to answer it."""

    history: list[Json]
    max_tokens: int = 24
    temperature: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | None = None
    tool: bool = False
    tops: int | None = None
    stream: bool = False
    ids: bool = False


@dataclass(frozen=True, slots=True)
class AnswerToolCall:
    """A tool call; `arguments` are what their JSON says."""

    id: str
    name: str
    arguments: Any


@dataclass(slots=True)
class RecordedStep:
    """What a gateway recorded of an answer."""

    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float] | None
    version: int | None
    quarantined: str | None


@dataclass(slots=True)
class CheckAnswer:
    """One choice. `items` is what an agent puts into its history; `log_probs` and `tops` are by token, `tokens` their
    texts. What the server did not tell is None."""

    text: str = ""
    reasoning: str = ""
    calls: list[AnswerToolCall] = field(default_factory=list)
    finish: str | None = None
    told_prompt_ids: list[int] | None = None
    told_ids: list[int] | None = None
    tokens: list[str] = field(default_factory=list)
    log_probs: list[float] | None = None
    tops: list[list[tuple[str, float]]] = field(default_factory=list)
    consumed: int | None = None
    sampled: int | None = None
    items: list[Json] = field(default_factory=list)
    version: str | None = None
    step: RecordedStep | None = None

    @property
    def prompt_ids(self) -> list[int] | None:
        return self.step.prompt_ids if self.step is not None else self.told_prompt_ids

    @property
    def ids(self) -> list[int] | None:
        return self.step.ids if self.step is not None else self.told_ids

    @property
    def whole(self) -> list[int] | None:
        """The prompt and the response, which the next prompt must begin with."""
        return None if self.prompt_ids is None or self.ids is None else self.prompt_ids + self.ids

    def check(self) -> None:
        """Raises `Malformed` where a field holds something of another type."""
        for name in ("text", "reasoning"):
            if not isinstance(getattr(self, name), str):
                raise Malformed(f"the {name} is {getattr(self, name)!r:.80}, no text")
        for name in ("told_prompt_ids", "told_ids"):
            ids = getattr(self, name)
            if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
                raise Malformed(f"{name.removeprefix('told_')} are {ids!r:.80}, no list of ids")

    def said(self) -> tuple[str, str, list[tuple[str, Any]], str | None]:
        """What an agent sees of the answer; equal for answers that are the same."""
        return self.text, self.reasoning, [(call.name, call.arguments) for call in self.calls], self.finish


@dataclass(slots=True)
class JoinedStream:
    """A stream put together: the body that its events amount to, and its faults, as cause and text."""

    body: Json
    troubles: list[tuple[str, str]] = field(default_factory=list)

    def trouble(self, cause: str, said: str) -> None:
        """Adds a fault: a name for programs and a sentence for people."""
        self.troubles.append((cause, said))


class DialectClient(ABC):
    """Speaks one dialect as an agent's client does.

    turns       conversations go on from an answer
    log_probs   answers can have log-probs
    several     `n` answers can be asked for at once
    """

    name: str
    path: str
    turns: bool
    log_probs: bool
    several: bool

    def question(self, text: str) -> list[Json]:
        """A user's turn as items of a history."""
        return [{"role": "user", "content": text}]

    @abstractmethod
    def result(self, call: AnswerToolCall, text: str) -> list[Json]:
        """A tool's result as items of a history."""

    @abstractmethod
    def body(self, ask: CheckRequest, model: str) -> Json:
        """The request's JSON."""

    @abstractmethod
    def read(self, body: Json) -> list[CheckAnswer]:
        """The choices of a whole answer. Raises `Malformed`, or `KeyError`, `TypeError` and the like where its shape is
        wrong."""

    @abstractmethod
    def join(self, events: list[bytes]) -> JoinedStream:
        """The whole answer that a stream's events amount to, with its faults. Raises as `read`."""


def parse_arguments(text: Any) -> Any:
    """A tool call's arguments as parsed JSON; the text itself where it is not JSON."""
    try:
        return orjson.loads(text)
    except ValueError:
        return text
