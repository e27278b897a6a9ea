"""Any chat template: rendered as it is, bridged by asking it what it writes after an answer.

The bridge renders a small stand-in conversation whose answer is a mark, with the new messages after it, and takes what
comes after the mark (`tails`). `probe` tries on conversations with every kind of turn whether that is what the template
writes at the end of a whole conversation; a kind for which it is not is never bridged.

What the template would do to the past (strip reasoning, move the system message or the tools, leave turns out) is not
done: the bridge keeps what was sampled and sent, and `overrides` says so.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.tokens.forms import Grammar
from headrace.tokens.grammars import compiled, learned
from headrace.tokens.messages import Message, ToolCall, Unrenderable, to_dict
from headrace.tokens.probe import TemplateTraits, probe, text_or_none
from headrace.tokens.renderer import PROMPT_TAIL_TOKENS, GrammarParsing, RendererVariants, Tools, reasoning_is_open
from headrace.tokens.tails import (
    STAND_IN_TOOL,
    TemplateTail,
    after_mark,
    kind_of,
    marked_answers,
    own_end,
    stand_in,
    stand_in_tools,
    tail_after_calls,
    tail_after_text,
)
from headrace.tokens.vocabulary import Vocabulary

#: Options under which templates render the same on every day.
PINNED_OPTIONS = {"date_string": "26 Jul 2024"}
#: Ends of calls that are kept: one for each combination of tool names that a model called.
MAX_OWN_ENDS = 1024
ALPHANUMERIC = string.digits + string.ascii_letters


class TemplateRenderer(GrammarParsing):
    """A renderer for whatever chat template the tokenizer brings."""

    vision = "its chat template was not found to be one of a family that takes images here"

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: Mapping[str, Any] | None = None,
        *,
        grammar: Grammar | None = None,
        traits: TemplateTraits | None = None,
    ) -> None:
        template = vocabulary.hf.chat_template
        if not isinstance(template, str) or not template:
            found = "several chat templates" if template else "no chat template"
            raise Unrenderable(f"the tokenizer in {vocabulary.hf.name_or_path} has {found}; it must have one")
        self.name = "template"
        self.looks_back = PROMPT_TAIL_TOKENS
        self.vocabulary = vocabulary
        self.options = {**PINNED_OPTIONS, **(options or {})}
        self.grammar = grammar or learned(vocabulary, template, self.options).grammar
        self._added = tuple(token for token in vocabulary.added.values() if token)
        self._own_ends: dict[tuple[Any, ...], str | None] = {}
        self._compiled = compiled(template)
        self._special = dict(vocabulary.hf.special_tokens_map)
        self._globals = {} if self._compiled is None else dict(self._compiled.globals)
        self._known = {**self._globals, **self._special, **self.options}
        eos = str(vocabulary.hf.eos_token or "")
        self.traits = TemplateTraits()
        self.traits = traits if traits is not None else probe(self, eos)
        ends = (eos, self.traits.stop, *self.traits.openers, *self.traits.call_stops, "<|endoftext|>")
        self.stop_ids = frozenset(i for i in map(vocabulary.id_of, filter(None, ends)) if i is not None)
        self._variants: RendererVariants[TemplateRenderer] = RendererVariants()

    @property
    def overrides(self) -> frozenset[str]:
        return self.traits.overrides

    def with_options(self, options: Mapping[str, Any] | None) -> TemplateRenderer:
        if not options:
            return self
        # What a template does may hang on its options, so each set of them is probed.
        return self._variants.get(options, lambda: TemplateRenderer(self.vocabulary, options, grammar=self.grammar))

    def has_option(self, name: str) -> bool:
        return name in self.vocabulary.hf.chat_template

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return self.vocabulary.encode(self.text(messages, tools))

    def text(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True) -> str:
        """The prompt as text. Raises Unrenderable with the template's own words."""
        given = [self._given(message) for message in messages]
        try:
            text = self._written(given, [dict(tool) for tool in tools] or None, generate)
        except Exception as error:  # templates are programs of strangers and may raise anything
            raise Unrenderable(f"the model's chat template refuses these messages: {error}") from error
        return str(text)

    def _written(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool) -> Any:
        hf = self.vocabulary.hf
        if self._compiled is None:
            options = {"tools": tools, "tokenize": False, "add_generation_prompt": generate, **self.options}
            return hf.apply_chat_template(messages, **options)
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generate}
        template, environment = self._compiled, self._compiled.environment
        if not given.keys().isdisjoint(self.options):
            return template.render(**given, **{**self._special, **self.options})  # which says what is wrong
        # What `render` does, without putting together again what is the same each time.
        context = environment.context_class(
            environment, {**self._known, **given}, template.name, template.blocks, globals=self._globals
        )
        return environment.concat(template.root_render_func(context))

    @property
    def thinks(self) -> bool:
        """Whether its answers have reasoning in a form that is known."""
        return bool(self.grammar.reasoning)

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
        if not new or any(message.role == "assistant" for message in new):
            return None
        if kind_of(calls, new) not in self.traits.bridged:
            return None
        tail = self.tail(calls, new, earlier, tools=tools)
        if tail is None:
            return None
        end = self.vocabulary.id_of(tail.token) if tail.token else None
        last = response[-1] if response else None
        if last is not None and last == end:
            return self._behind(tail.token, tail.rest)
        if last in self.stop_ids:
            return self._behind_stop(last, tail)
        if not self.stop_ids.isdisjoint(response):
            return None  # it went on after its end: where the turn closed cannot be said
        closed = calls and end in response and tail.token not in self.traits.closers  # as a call ends, not a turn
        ids = self._behind(self.traits.stop, tail.rest if closed else tail.gap + tail.text)
        thought = self._thought_end(prompt, response)
        return ids if ids is None or ids[: len(thought)] == thought else thought + ids

    def _thought_end(self, prompt: Sequence[int], response: Sequence[int]) -> list[int]:
        """What ends the reasoning that a response was cut in; nothing where it was not."""
        thought = self.grammar.reasoning
        if thought is not None and reasoning_is_open(self.vocabulary, prompt, response, thought):
            return self.vocabulary.encode(thought.close)
        return []

    def _behind(self, token: str, text: str) -> list[int] | None:
        """The ids of a text that stands behind a token. What a tokenizer does at a text's very beginning is not what it
        does after a token, so both are encoded and the token is taken off."""
        ids = self.vocabulary.encode(token + text)
        return ids[1:] if ids and ids[0] == self.vocabulary.id_of(token) else None

    def _behind_stop(self, stop: int, tail: TemplateTail) -> list[int] | None:
        """What follows an answer that ended with another token than the template writes there."""
        token = self.vocabulary.added.get(stop, self.traits.stop)
        ids = self._behind(token, tail.text if tail.opens else tail.rest)
        if ids and ids[0] == stop and token in self.traits.openers:
            return ids[1:]  # it is the new turn's first token that ended the answer
        return ids

    def tail(
        self,
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        earlier: Sequence[Message] = (),
        *,
        tools: bool = False,
        deep: bool | None = None,
    ) -> TemplateTail | None:
        """What follows an answer that made `calls`, when `new` comes in; None where that is not clear.

        `earlier` is what came before the answer, which counts for the kinds that depend on it (`deep`; given, it
        decides). `tools` says whether the conversation has any.
        """
        kind = kind_of(calls, new)
        before = stand_in(())[:1]
        if kind in self.traits.deep if deep is None else deep:
            moved = "system" in self.traits.overrides
            before = [_without_reasoning(message) for message in earlier if not (moved and message.role == "system")]
        offer = self.traits.needs_tools or (tools and kind in self.traits.tooled)
        made = [
            call for message in (*before, Message("assistant", "", None, tuple(calls))) for call in message.tool_calls
        ]
        offered = stand_in_tools(made) if offer else ()
        for answer in marked_answers(calls) if before else ():
            after = after_mark(text_or_none(self, [*before, answer, *new], offered))
            if after is None:
                continue
            if offer and STAND_IN_TOOL in after:
                return None
            if not answer.tool_calls:
                return tail_after_text(after, self.traits.closers, self.traits.openers, self._added)
            own = self._own_end(answer)
            return None if own is None else tail_after_calls(after, own, self.traits.closers, self._added)
        return None

    def _own_end(self, answer: Message) -> str | None:
        """What is written between the mark in a call and whatever follows the turn; None where that is not clear."""
        calls = answer.tool_calls
        key = tuple((call.name, bool(call.arguments), call.id if self.traits.late_ids else "") for call in calls)
        if key in self._own_ends:
            return self._own_ends[key]
        marked, offered = [*stand_in(())[:1], answer], stand_in_tools(calls) if self.traits.needs_tools else ()
        results = [Message("tool", "found", None, (), call.id, call.name) for call in calls]
        texts = [text_or_none(self, marked, offered, generate=False)]
        texts += [text_or_none(self, [*marked, *new], offered) for new in (results, [Message("user", "more")])]
        alone, *followed = map(after_mark, texts)
        ends = [after for after in (alone, *followed) if after is not None]
        found = own_end(ends, self._added) if len(ends) > 1 or alone is not None else None
        if found is not None and None not in followed and not any(token in found for token in self.traits.closers):
            # An answer that nothing follows may be left open; two that something follows share their end.
            closed = own_end([after for after in followed if after is not None], self._added)
            found = closed if any(token in closed for token in self.traits.closers) else found
        if len(self._own_ends) < MAX_OWN_ENDS:
            self._own_ends[key] = found
        return found

    def _given(self, message: Message) -> dict[str, Any]:
        """A message as this template takes it."""
        traits = self.traits
        if traits.short_ids and (message.tool_calls or message.tool_call_id):
            message = _with_short_ids(message)
        given = to_dict(message)
        if traits.text_arguments:
            for call in given.get("tool_calls", ()):
                function = call["function"]
                if not isinstance(function["arguments"], str):
                    function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if traits.null_content and message.tool_calls and not message.content:
            given["content"] = None
        return given


def _without_reasoning(message: Message) -> Message:
    return message if message.reasoning is None else msgspec.structs.replace(message, reasoning=None)


def _with_short_ids(message: Message) -> Message:
    return msgspec.structs.replace(
        message,
        tool_calls=tuple(ToolCall(call.name, call.arguments, short_id(call.id)) for call in message.tool_calls),
        tool_call_id=None if message.tool_call_id is None else short_id(message.tool_call_id),
    )


def short_id(call_id: str) -> str:
    """A tool call id of nine letters and digits; one that is such already stays."""
    if len(call_id) == 9 and all(char in ALPHANUMERIC for char in call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=9).digest()
    return "".join(ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest)
