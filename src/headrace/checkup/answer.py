"""A question and an answer, whichever dialect they travel in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

#: The tool that a model is offered. Models know this one well.
TOOL = "add"
TOOL_SAYS = "Adds."
PARAMETERS: Json = {
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "type": "object",
}


class Malformed(Exception):
    """An answer that is not of its dialect's shape: what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for: a history in the dialect's own items, and how to answer it."""

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
class Call:
    """A tool call; `arguments` are what their JSON says."""

    id: str
    name: str
    arguments: Any


@dataclass(slots=True)
class Step:
    """What a gateway recorded of an answer."""

    prompt_ids: list[int]
    ids: list[int]
    log_probs: list[float] | None
    version: int | None
    quarantined: str | None


@dataclass(slots=True)
class Answer:
    """One choice. `items` is what an agent puts into its history; `log_probs` and `tops` are by token, `tokens` their
    texts. What the server did not tell is None."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
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
    step: Step | None = None

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
        """`Malformed` where a server put something else in a field's place."""
        for name in ("text", "reasoning"):
            if not isinstance(getattr(self, name), str):
                raise Malformed(f"the {name} is {getattr(self, name)!r:.80}, no text")
        for name in ("told_prompt_ids", "told_ids"):
            ids = getattr(self, name)
            if ids is not None and not (isinstance(ids, list) and all(type(token) is int for token in ids)):
                raise Malformed(f"{name.removeprefix('told_')} are {ids!r:.80}, no list of ids")

    def said(self) -> tuple[str, str, list[tuple[str, Any]], str | None]:
        """What an agent sees: equal for answers that are the same."""
        return self.text, self.reasoning, [(call.name, call.arguments) for call in self.calls], self.finish


@dataclass(slots=True)
class Stream:
    """A stream put together again: the body that it amounts to, and what was wrong on the way, as cause and words."""

    body: Json
    troubles: list[tuple[str, str]] = field(default_factory=list)

    def trouble(self, cause: str, said: str) -> None:
        self.troubles.append((cause, said))
