"""`Turn`: one prompt of a call and its answers, in no dialect. Pieces of an answer go in, what agents see comes out.

A whole answer is a stream of one piece, so that both are read by the same code. What was sampled is kept as it came:
the check that decides whether it may be trained on comes afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from headrace.data.step import FloatArray, IntArray
from headrace.gateway.request import CallRequest
from headrace.gateway.upstream.types import SampledChoice, UpstreamRequest
from headrace.tokens import (
    AnswerDelta,
    AnswerStream,
    CallDelta,
    Detokenizer,
    Message,
    Parsed,
    PromptPlan,
    ToolCall,
    Vocabulary,
)
from headrace.tokens.answer import NOTHING
from headrace.tokens.conversation import DIGEST_BYTES
from headrace.tokens.stops import StoppedText

#: Tool call ids are nine letters or digits: the form that every family's template takes.
TOOL_CALL_ID_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOOL_CALL_ID_LENGTH = 9

#: Bytes of a text after which the digest of its beginning can be looked up.
CHUNK_BYTES = 256


def digest_of(data: bytes) -> str:
    """The digest by which steps' metadata names requests and texts."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def named_call_id(trajectory: str, digest: str) -> str:
    """The id of a call that has a name, the same for all its tries, wherever they are carried out: the pool takes what
    one of them sampled."""
    return blake2b(f"{trajectory}/{digest}".encode(), digest_size=16).hexdigest()


class TextKey(msgspec.Struct, frozen=True):
    """What the text of a completion, prompt and answer, is known by in its step's metadata.

    `length` in characters and `digest` of all of it; to look it up among many, also `anchor`, the digest of its whole
    chunks, and `tail`, how many bytes follow them.
    """

    length: int
    digest: str
    anchor: str
    tail: int

    @classmethod
    def of(cls, text: str) -> TextKey:
        """The key of a text."""
        data = text.encode()
        tail = len(data) % CHUNK_BYTES
        hasher = blake2b(data[: len(data) - tail], digest_size=DIGEST_BYTES)
        anchor = hasher.hexdigest()
        hasher.update(data[len(data) - tail :])
        return cls(len(text), hasher.hexdigest(), anchor, tail)

    @classmethod
    def from_metadata(cls, given: Any) -> TextKey | None:
        """The key in a step's metadata; None where a flow wrote something of its own there."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError:
            return None


class TextAnswerStream:
    """Reads the answer to a text completion: no reasoning, no calls, only text up to a stop string."""

    def __init__(
        self, vocabulary: Vocabulary, stop: Sequence[str], prompt: Sequence[int] = (), min_tokens: int = 0
    ) -> None:
        self._stopped = StoppedText(Detokenizer(vocabulary, prompt=prompt), stop, min_tokens)
        self._text: list[str] = []

    def feed(self, ids: Sequence[int]) -> AnswerDelta:
        return self._add(self._stopped.feed(ids))

    def feed_parts(self, ids: Sequence[int]) -> list[AnswerDelta]:
        return [self.feed(ids)]

    def finish(self) -> AnswerDelta:
        return self._add(self._stopped.finish())

    def _add(self, text: str) -> AnswerDelta:
        if text:
            self._text.append(text)
        return AnswerDelta(text)

    @property
    def parsed(self) -> Parsed:
        return Parsed("".join(self._text))


class Choice:
    """One of the answers to a turn's prompt, as far as it has been sampled."""

    def __init__(
        self, index: int, reader: AnswerStream, thought: int | None = None, *, single_tool_call: bool = False
    ) -> None:
        """`thought` is the id that ends reasoning, where there is one. With `single_tool_call` agents see no call but
        the first."""
        self.index = index
        self.reader = reader
        self._thought = thought
        self._single_tool_call = single_tool_call
        self.ids: list[int] = []
        self.log_probs: list[float] | None = []
        self.text: str | None = ""
        self.tokens: list[str] = []
        self.top: list[dict[str, float]] = []
        self.continued = False  # whether several requests sampled it
        self.sampled: SampledChoice | None = None  # the last piece: how it ended
        self.consumed: IntArray | None = None
        self.parsed = Parsed()  # what the ids say, once they are all there

    def take(self, piece: SampledChoice) -> AnswerDelta:
        """Adds a piece that was sampled; what the agent may see of it now."""
        self._keep(piece)
        return self._shown(self.reader.feed(piece.ids))

    def take_parts(self, piece: SampledChoice) -> list[AnswerDelta]:
        """Like `take` for a piece of many tokens: part by part in the order in which they were written; never empty."""
        self._keep(piece)
        parts = self.reader.feed_parts(piece.ids)
        if len(parts) == 1 and not parts[0].tool_calls:
            return parts
        return [shown for part in parts if (shown := self._shown(part))] or [NOTHING]

    def _keep(self, piece: SampledChoice) -> None:
        self.continued |= piece.continued
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

    def finish(self) -> AnswerDelta:
        """Ends the answer; what was held back of it. `parsed` is complete from here on."""
        last = self.reader.finish()
        self.parsed = self.reader.parsed
        return self._shown(last)

    def _shown(self, delta: AnswerDelta) -> AnswerDelta:
        """What agents see of a delta: the calls that are shown, what is new of each in one."""
        if not delta.tool_calls:
            return delta
        by_call: dict[int, CallDelta] = {}
        for new in delta.tool_calls:
            if new.index and self._single_tool_call:
                continue
            had = by_call.get(new.index)
            by_call[new.index] = (
                new
                if had is None
                else CallDelta(new.index, had.id or new.id, had.name or new.name, had.arguments + new.arguments)
            )
        return AnswerDelta(delta.content, delta.reasoning, tuple(by_call.values()))

    def message(self) -> Message:
        """The answer as the agent sees it, and will send it back."""
        parsed = self.parsed
        calls = parsed.tool_calls[:1] if self._single_tool_call else parsed.tool_calls
        return Message("assistant", parsed.content, parsed.reasoning, calls)

    def whole(self) -> AnswerDelta:
        """All of an answer that has ended as one delta."""
        said = self.message()
        calls = (CallDelta(at, call.id, call.name, call.arguments_text) for at, call in enumerate(said.tool_calls))
        return AnswerDelta(said.content, said.reasoning or "", tuple(calls))

    def call(self, number: int) -> ToolCall:
        """One of its calls, as far as it was read."""
        return self.reader.parsed.tool_calls[number]

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for how it ended. Agents are told to carry calls out where one of them is whole."""
        said = (self.sampled.finish_reason if self.sampled else None) or "stop"
        return "tool_calls" if said == "stop" and any(call.whole for call in self.message().tool_calls) else said

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids are reasoning, its end included."""
        if self._thought is not None and self._thought in self.ids:
            return self.ids.index(self._thought) + 1
        return len(self.ids) if self.parsed.cut == "reasoning" else 0

    def response(self) -> IntArray:
        """The sampled ids."""
        return np.asarray(self.ids, np.int32)

    def values(self) -> FloatArray | None:
        """Their log-probs; None where the server gave none."""
        return None if self.log_probs is None else np.asarray(self.log_probs, np.float32)


class Turn(msgspec.Struct, kw_only=True, eq=False):
    """A prompt of a call: what was asked, the ids that it became, and the answers to it. Most calls have one turn; a
    text completion has one for each of its prompts."""

    call_id: str
    request: CallRequest
    plan: PromptPlan
    upstream_request: UpstreamRequest
    choices: list[Choice]
    first: int = 0  # the number of the first choice, where a call has several prompts
    created: int = 0
    began: float = 0.0
    first_token: float | None = None
    server: str = ""
    request_digest: str = ""  # the digest of the request's body
    call_bytes: int = 0  # of the call's fields, as each of its steps keeps them
    text: str | None = None  # the prompt of a text completion
    text_keys: list[TextKey] = []  # what it and its answers are known by, once they are recorded

    @property
    def version(self) -> int:
        """The oldest policy version that sampled any of it."""
        spans = [span for choice in self.choices if choice.sampled for span in choice.sampled.spans]
        return min((version for _, version in spans), default=0)


def tool_call_ids(call_id: str, choice: int) -> Callable[[int], str]:
    """Makes the ids of a choice's tool calls, by their number; the same ones again where the same call is replayed."""

    def name(number: int) -> str:
        digest = blake2b(f"{call_id}/{choice}/{number}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        letters = []
        for _ in range(TOOL_CALL_ID_LENGTH):
            value, at = divmod(value, len(TOOL_CALL_ID_ALPHABET))
            letters.append(TOOL_CALL_ID_ALPHABET[at])
        return "".join(letters)

    return name


def completion_tokens(turns: list[Turn]) -> int:
    """The tokens that were sampled for a call."""
    return sum([len(choice.ids) for turn in turns for choice in turn.choices])


def prompt_tokens(turns: list[Turn]) -> int:
    """The tokens of a call's prompts."""
    return sum([len(turn.plan.ids) for turn in turns])


def usage(turns: list[Turn]) -> dict[str, Any]:
    """OpenAI's `usage` of a call."""
    asked, answered = prompt_tokens(turns), completion_tokens(turns)
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}
