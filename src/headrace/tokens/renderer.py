"""What a model family's renderer promises, and the half of it that is the same for all: reading answers.

`render` writes a whole prompt. `bridge` says which ids to append to a prompt and its sampled response, so that what it
gives always begins, bit for bit, with both; it answers None where it cannot prove that the ids belong there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar

from headrace.tokens.channels import parser_of
from headrace.tokens.forms import THINK, Channels, Grammar, Reasoning
from headrace.tokens.messages import Message, ToolCall
from headrace.tokens.parse import AnswerDelta, NewId, Parsed
from headrace.tokens.stops import StoppedText
from headrace.tokens.vision import Vision
from headrace.tokens.vocabulary import Detokenizer, Vocabulary

R = TypeVar("R")

Tools = Sequence[Mapping[str, Any]]
#: Ids before an answer that tell how the prompt ended. A generation prompt has about ten.
PROMPT_TAIL_TOKENS = 64
#: The last of them, enough for the mark that opens reasoning, spelt in single characters, and white space behind it.
OPENING_TAIL_TOKENS = 16


class Renderer(Protocol):
    """Messages to ids and back, for one model family and one set of template options."""

    @property
    def name(self) -> str:
        """The family's name; `template` where the model's own template writes prompts."""
        ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def grammar(self) -> Grammar:
        """How the family writes reasoning and tool calls."""
        ...

    @property
    def looks_back(self) -> int | None:
        """How many of a prompt's last ids its bridge needs; None for all."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a turn."""
        ...

    @property
    def vision(self) -> Vision | str:
        """How images stand in a prompt, or why there can be none. What is rendered has one placeholder an image."""
        ...

    @property
    def overrides(self) -> frozenset[str]:
        """In which ways this bridge keeps what the template would move or strip: reasoning, system, tools,
        turns."""
        ...

    def with_options(self, options: Mapping[str, Any] | None) -> Renderer:
        """This renderer under other template options (`enable_thinking`, ...)."""
        ...

    def has_option(self, name: str) -> bool:
        """Whether the template makes a difference of this option."""
        ...

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The whole prompt of messages, ready for an answer; raises `Unrenderable` where it cannot hold them."""
        ...

    def bridge(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        earlier: Sequence[Message] = (),
        *,
        tools: bool = False,
    ) -> list[int] | None:
        """The ids that follow `prompt` + `response` when `new` messages come in; `prompt` may be its
        last `looks_back` ids alone.

        `calls` are those that the response made, `earlier` the messages that it answered, and `tools` says whether any
        were offered. What the model left unclosed is closed first: that is context.
        """
        ...

    def stream(
        self,
        prompt: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> AnswerStream:
        """Reads the answer to a prompt as it is sampled. `new_id` makes its tool calls' ids, `stop` ends its text, but
        not within the first `min_tokens`.

        `tools` are those that were offered, or whether there were any; with none, nothing is a call."""
        ...

    def parse(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
    ) -> Parsed:
        """Reads a whole answer; see `stream`."""
        ...


class AnswerStream(Protocol):
    """One answer being sampled: ids in, deltas out."""

    def feed(self, ids: Sequence[int]) -> AnswerDelta:
        """Takes the next ids; what an agent may see of them now."""
        ...

    def feed_parts(self, ids: Sequence[int]) -> list[AnswerDelta]:
        """Like `feed`, in the order in which it was written, each part of one kind: content, reasoning or one call."""
        ...

    def finish(self) -> AnswerDelta:
        """Ends the answer; what was held back of it."""
        ...

    @property
    def parsed(self) -> Parsed:
        """The answer as far as it was read; whole after `finish`."""
        ...


def default_call_id(number: int) -> str:
    """The id of an answer's tool call where the caller makes none."""
    return f"call_{number}"


class GrammarStream:
    """An answer of a family whose grammar is known."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammar: Grammar,
        stop_ids: frozenset[int],
        prompt: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId,
        stop: Sequence[str],
        min_tokens: int = 0,
    ) -> None:
        markers = marker_ids(vocabulary, grammar)
        detokenizer = Detokenizer(vocabulary, keep=markers, drop=stop_ids, prompt=prompt)
        self._stop_ids = stop_ids
        self._call_end, self._call_end_id = _call_end(vocabulary, grammar)
        self._ended_call = False
        self._stopped = StoppedText(detokenizer, stop, min_tokens)
        thinking = grammar.reasoning is not None and opens_reasoning(vocabulary, prompt, grammar.reasoning)
        self._parser = parser_of(grammar, tools=tools, thinking=thinking, new_id=new_id)

    def feed(self, ids: Sequence[int]) -> AnswerDelta:
        return self._parser.feed(self._text(ids))

    def feed_parts(self, ids: Sequence[int]) -> list[AnswerDelta]:
        return self._parser.feed_parts(self._text(ids))

    def _text(self, ids: Sequence[int]) -> str:
        if ids:
            self._ended_call = ids[-1] == self._call_end_id and ids[-1] in self._stop_ids
        return self._stopped.feed(ids)

    def finish(self) -> AnswerDelta:
        last = self._stopped.finish()
        if self._ended_call and not self._stopped.stopped:
            last += self._call_end  # behind all that a stop string is looked for in: it is no text
        before = self._parser.feed(last)
        return join_deltas(before, self._parser.finish())

    @property
    def parsed(self) -> Parsed:
        return self._parser.parsed


class GrammarParsing:
    """The parsing half of a renderer whose grammar is known."""

    vocabulary: Vocabulary
    grammar: Grammar
    stop_ids: frozenset[int]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> AnswerStream:
        return GrammarStream(
            self.vocabulary,
            self.grammar,
            self.stop_ids,
            prompt,
            tools=tools,
            new_id=new_id or default_call_id,
            stop=stop,
            min_tokens=min_tokens,
        )

    def parse(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
    ) -> Parsed:
        stream = self.stream(prompt, tools=tools, new_id=new_id, stop=stop)
        stream.feed(response)
        stream.finish()
        return stream.parsed


def join_deltas(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    """Two deltas that follow each other as one."""
    return AnswerDelta(
        first.content + second.content, first.reasoning + second.reasoning, first.tool_calls + second.tool_calls
    )


def _call_end(vocabulary: Vocabulary, grammar: Grammar) -> tuple[str, int | None]:
    """The mark that ends a call and the turn, and its id, where a call without arguments is told by it from one that
    was cut."""
    body = grammar.calls.body if grammar.calls is not None else None
    return (body.call, vocabulary.id_of(body.call)) if isinstance(body, Channels) else ("", None)


@lru_cache(64)
def marker_ids(vocabulary: Vocabulary, grammar: Grammar) -> frozenset[int]:
    """The special tokens that must stay visible in an answer's text for its grammar to be read."""
    markers = grammar.markers
    return frozenset(i for i in vocabulary.special if any(vocabulary.added[i] in marker for marker in markers))


def opens_reasoning(vocabulary: Vocabulary, prompt: Sequence[int], reasoning: Reasoning = THINK) -> bool:
    """Whether a prompt ends inside a reasoning block that it opened itself."""
    text = vocabulary.decode(prompt[-OPENING_TAIL_TOKENS:]).rstrip()
    return text.endswith(reasoning.open.strip())


def reasoning_is_open(
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    response: Sequence[int],
    reasoning: Reasoning = THINK,
) -> bool:
    """Whether a response ended in the middle of its reasoning."""
    opener, closer = reasoning.open.strip(), reasoning.close.strip()
    thought = vocabulary.id_of(closer)
    if thought is not None and thought in response:
        return False
    text = vocabulary.decode(response)
    if not opens_reasoning(vocabulary, prompt, reasoning) and not text.lstrip().startswith(opener):
        return False
    return closer not in text


#: Renderers kept per model. Options come from agents, so their number must not be an agent's to choose.
MAX_VARIANTS = 32


class RendererVariants(Generic[R]):
    """Renderers under other template options: made when first asked for, the ones used last kept."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, R] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, options: Mapping[str, Any], make: Callable[[], R]) -> R:
        """The renderer under these options; `make` is called where it is not known."""
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        found = self._known.pop(key, None)
        self._known[key] = found = make() if found is None else found
        if len(self._known) > MAX_VARIANTS:
            self._known.popitem(last=False)
        return found
