"""`Turn`: one call from its prompt to its answer, in no dialect. Pieces go in, what agents see comes out.

A whole answer is a stream of one piece, so that both are read by the same code. What was sampled is kept as it came:
the check that decides whether it may be trained on comes afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from headrace.data.step import FloatArray, IntArray
from headrace.gateway.ask import Ask
from headrace.gateway.text_key import TextKey
from headrace.gateway.upstream.types import Order, SampledChoice
from headrace.tokens import (
    AnswerDelta,
    AnswerStream,
    Message,
    Parsed,
    PromptPlan,
)

#: Tool call ids are nine letters or digits: the form that every family's template takes.
ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9


class Choice:
    """One answer of a turn, as far as it has come."""

    def __init__(self, index: int, reader: AnswerStream, thought: int | None = None) -> None:
        """`thought` is the id that ends reasoning, where there is one."""
        self.index = index
        self.reader = reader
        self._thought = thought
        self.ids: list[int] = []
        self.log_probs: list[float] | None = []
        self.text: str | None = ""
        self.tokens: list[str] = []
        self.top: list[dict[str, float]] = []
        self.sampled: SampledChoice | None = None  # the last piece: how it ended
        self.consumed: IntArray | None = None
        self.parsed = Parsed()  # what the ids say, once they are all there

    def take(self, piece: SampledChoice) -> AnswerDelta:
        """A piece's text, as far as it is certain."""
        self.ids += piece.ids
        if piece.log_probs is None or self.log_probs is None:
            self.log_probs = None
        else:
            self.log_probs += piece.log_probs
        if piece.text is None or self.text is None:
            self.text = None
        else:
            self.text += piece.text
        self.tokens += piece.tokens or ()
        self.top += piece.top or ()
        if piece.consumed is not None:
            self.consumed = piece.consumed
        self.sampled = piece
        return self.reader.feed(piece.ids)

    def finish(self) -> AnswerDelta:
        last = self.reader.finish()
        self.parsed = self.reader.parsed
        return last

    def message(self, *, one_call: bool) -> Message:
        """What the agent sees, and will send back."""
        parsed = self.parsed
        calls = parsed.tool_calls[:1] if one_call else parsed.tool_calls
        return Message("assistant", parsed.content, parsed.reasoning, calls)

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended."""
        said = (self.sampled.finish_reason if self.sampled else None) or "stop"
        return "tool_calls" if said == "stop" and self.parsed.tool_calls else said

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids are reasoning, its end included."""
        if self._thought is not None and self._thought in self.ids:
            return self.ids.index(self._thought) + 1
        return len(self.ids) if self.parsed.cut == "reasoning" else 0

    def response(self) -> IntArray:
        return np.asarray(self.ids, np.int32)

    def values(self) -> FloatArray | None:
        return None if self.log_probs is None else np.asarray(self.log_probs, np.float32)


class Turn(msgspec.Struct, kw_only=True, eq=False):
    """A call: what was asked, the prompt that it became, and the answers to it."""

    call_id: str
    ask: Ask
    plan: PromptPlan
    order: Order
    choices: list[Choice]
    first: int = 0  # the number of the first choice, where a call has several prompts
    created: int = 0
    began: float = 0.0
    first_token: float | None = None
    server: str = ""
    request: str = ""  # the digest of the request's body
    text: str | None = None  # the prompt of a text completion
    text_keys: list[TextKey] = []  # what it and its answers are known by, once they are recorded

    @property
    def version(self) -> int:
        """The oldest policy version that sampled any of it."""
        spans = [span for choice in self.choices if choice.sampled for span in choice.sampled.spans]
        return min((version for _, version in spans), default=0)


def new_ids(call_id: str, choice: int) -> Callable[[int], str]:
    """Names a choice's tool calls: always the same ones for the same call."""

    def name(number: int) -> str:
        digest = blake2b(f"{call_id}/{choice}/{number}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        letters = []
        for _ in range(ID_LENGTH):
            value, at = divmod(value, len(ID_ALPHABET))
            letters.append(ID_ALPHABET[at])
        return "".join(letters)

    return name


def completion_tokens(turns: list[Turn]) -> int:
    return sum(len(choice.ids) for turn in turns for choice in turn.choices)


def prompt_tokens(turns: list[Turn]) -> int:
    return sum(len(turn.plan.ids) for turn in turns)


def usage(turns: list[Turn]) -> dict[str, Any]:
    asked, answered = prompt_tokens(turns), completion_tokens(turns)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
