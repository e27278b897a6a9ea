"""Any chat template: rendered as it is, bridged only as far as a probe proves that it appends.

The bridge asks the template itself what follows an answer: it renders a small stand-in conversation whose answer is a
mark, with the new messages after it, and takes what comes after the mark. That is right only if what a template writes
for new messages does not depend on what came long before, and if it leaves what it wrote before alone. `probe` tries
both on conversations with every kind of turn; a kind that fails is never bridged.

System messages, tools and reasoning are a matter of their own, since templates move or strip them: there the bridge
keeps what was sent, and `overrides` says so.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.tokens.forms import Grammar
from headrace.tokens.grammars import compiled, learned
from headrace.tokens.messages import Message, ToolCall, Unrenderable, to_dict
from headrace.tokens.renderer import PROMPT_TAIL_TOKENS, GrammarParsing, RendererVariants, Tools, reasoning_is_open
from headrace.tokens.vocabulary import Vocabulary

#: Stands for what the model sampled. No template writes it of its own, and it survives any JSON encoding.
ANSWER_MARK = "headraceanswermark"
#: Options under which templates render the same on every day.
PINNED_OPTIONS = {"date_string": "26 Jul 2024"}
#: Stand-in conversations whose text is kept: one for each combination of tool names that a model called.
MAX_STAND_INS = 1024
ALPHANUMERIC = string.digits + string.ascii_letters


class TemplateTail(msgspec.Struct, frozen=True):
    """What a template writes after an answer: the rest of the answer's own turn, then the new messages."""

    close: str
    rest: str


class TemplateTraits(msgspec.Struct, frozen=True):
    """What a probe found out about a template."""

    stop: str = ""  # the token that ends an assistant's turn
    short_ids: bool = False  # tool call ids must be nine letters or digits (Mistral)
    bridged: frozenset[str] = frozenset()  # the kinds of turn that only append
    refused: Mapping[str, str] = {}  # the other kinds, and why
    overrides: frozenset[str] = frozenset()  # what the template moves or strips and the bridge keeps


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
        if not isinstance(template, str):
            found = "several chat templates" if template else "no chat template"
            raise Unrenderable(f"the tokenizer in {vocabulary.hf.name_or_path} has {found}; it must have one")
        self.name = "template"
        self.looks_back = PROMPT_TAIL_TOKENS
        self.vocabulary = vocabulary
        self.options = {**PINNED_OPTIONS, **(options or {})}
        self.grammar = grammar or learned(vocabulary, template, self.options).grammar
        self._alone: dict[tuple[Any, ...], str] = {}
        self._compiled = compiled(template)
        self._special = dict(vocabulary.hf.special_tokens_map)
        self.traits = TemplateTraits()
        self.traits = traits if traits is not None else probe(self)
        eos = vocabulary.hf.eos_token_id
        stop = vocabulary.id_of(self.traits.stop) if self.traits.stop else None
        self.stop_ids = frozenset(i for i in (eos, stop, vocabulary.id_of("<|endoftext|>")) if i is not None)
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
        given = [to_dict(self._with_short_ids(message)) for message in messages]
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
        return self._compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=generate,
            **{**self._special, **self.options},
        )

    def bridge(
        self, prompt: Sequence[int], response: Sequence[int], calls: Sequence[ToolCall], new: Sequence[Message]
    ) -> list[int] | None:
        if not new or any(message.role == "assistant" for message in new):
            return None
        if kind_of(calls, new) not in self.traits.bridged:
            return None
        tail = self.tail(calls, new)
        if tail is None or not tail.close.startswith(self.traits.stop):
            return None
        # The stop token is encoded with what follows it and then taken off: what a tokenizer does at a text's very
        # beginning is not what it does after a token.
        ids = self.vocabulary.encode(tail.close + tail.rest)
        stop = self.vocabulary.id_of(self.traits.stop)
        if not ids or ids[0] != stop:
            return None
        if response and response[-1] in self.stop_ids:
            return ids[1:]
        if not self.stop_ids.isdisjoint(response):
            return None  # it went on after its end: where the turn closed cannot be said
        thought = self.grammar.reasoning
        if thought is not None and reasoning_is_open(self.vocabulary, prompt, response, thought):
            return self.vocabulary.encode(thought.close) + ids
        return ids

    def tail(self, calls: Sequence[ToolCall], new: Sequence[Message]) -> TemplateTail | None:
        """What follows an answer that made `calls`, when `new` comes in; None where that is not clear."""
        try:
            marked = stand_in(calls)
            alone, followed = self._closed(calls, marked), self.text([*marked, *new])
        except Unrenderable:
            return None
        own, after = _after_mark(alone), _after_mark(followed)
        if own is None or after is None or not after.startswith(own):
            return None
        # After a marked argument come the call's own closing quotes and brackets, which the model wrote itself.
        at = own.find(self.traits.stop) if self.traits.stop else 0
        return TemplateTail(own[at:], after[len(own) :]) if at >= 0 else None

    def _closed(self, calls: Sequence[ToolCall], marked: Sequence[Message]) -> str:
        """A stand-in with nothing after it; the same few come again and again."""
        key = (self.traits.short_ids, *((call.name, call.id) for call in calls))
        known = self._alone.get(key)
        if known is None:
            known = self.text(marked, generate=False)
            if len(self._alone) < MAX_STAND_INS:
                self._alone[key] = known
        return known

    def _with_short_ids(self, message: Message) -> Message:
        if not self.traits.short_ids or not (message.tool_calls or message.tool_call_id):
            return message
        return msgspec.structs.replace(
            message,
            tool_calls=tuple(ToolCall(call.name, call.arguments, short_id(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else short_id(message.tool_call_id),
        )


def kind_of(calls: Sequence[ToolCall], new: Sequence[Message]) -> str:
    """The kind of a turn: what came after what."""
    roles: list[str] = []
    for message in new:
        if not roles or roles[-1] != message.role:
            roles.append(message.role)
    return ("calls>" if calls else "answer>") + "+".join(roles)


def stand_in(calls: Sequence[ToolCall]) -> list[Message]:
    """A short conversation that ends with an answer that is, or whose last call ends with, the mark."""
    question = Message("user", "question")
    if not calls:
        return [question, Message("assistant", ANSWER_MARK)]
    made = [ToolCall(call.name, {}, call.id) for call in calls[:-1]]
    made.append(ToolCall(calls[-1].name, {"mark": ANSWER_MARK}, calls[-1].id))
    return [question, Message("assistant", "", None, tuple(made))]


def _after_mark(text: str) -> str | None:
    _, found, after = text.partition(ANSWER_MARK)
    return after if found else None


def short_id(call_id: str) -> str:
    """A tool call id of nine letters and digits; one that is such already stays."""
    if len(call_id) == 9 and all(char in ALPHANUMERIC for char in call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="surrogatepass"), digest_size=9).digest()
    return "".join(ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest)


# The probe.

_CALL = ToolCall("look_up", {"flag": True, "q": 'naïve 日本 "x"', "n": 2}, "abcdef123")
_OTHER = ToolCall("sum", {"values": [1, None, 2.5]}, "xyz987ABC")
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks things up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
_TEXTS = ("How are you?", "", "Grüße,\n\n日本 🙂 ", "  two  spaces\n")


def _user(n: int) -> Message:
    return Message("user", _TEXTS[n % len(_TEXTS)] or "again")


def _result(call: ToolCall, text: str) -> Message:
    return Message("tool", text, None, (), call.id, call.name)


def _histories() -> list[list[Message]]:
    """Conversations that end with an answer, after every kind of turn."""
    answers = [Message("assistant", text) for text in ("Well.", "", "Ünï 🙂")]
    asks = [Message("assistant", "", None, (_CALL,)), Message("assistant", "Let me see.", None, (_CALL,))]
    plain = [[_user(0), answers[0]], [_user(0), answers[1], _user(2), answers[2]]]
    tooled = [[_user(0), asks[0]], [_user(2), answers[0], _user(0), asks[1]]]
    tooled.append([_user(0), asks[0], _result(_CALL, "found"), answers[0], _user(3), asks[0]])
    plain.append([_user(0), asks[1], _result(_CALL, ""), answers[2]])
    both = Message("assistant", "", None, (_CALL, _OTHER))
    return [*plain, *tooled, [_user(0), both]]


def _followers(calls: Sequence[ToolCall]) -> list[list[Message]]:
    """What may come after an answer, for every kind of turn that is probed."""
    asked = [[_user(0)], [_user(2)], [_user(0), _user(2)], [Message("system", "Be brief."), _user(0)]]
    if not calls:  # an agent may read calls out of an answer's text itself
        return [*asked, [_result(_CALL, "42")]]
    results = [_result(call, text) for call, text in zip(calls, ("42", '{"a": true}'), strict=False)]
    return [results, [_result(call, "") for call in calls], [*results, _user(0)], *asked]


def probe(renderer: TemplateRenderer) -> TemplateTraits:
    """Which kinds of turn a template only appends, found by trying; the renderer's own traits are not used."""
    traits = TemplateTraits()
    renderer.traits = traits
    own = _after_mark(_text_or_none(renderer, stand_in(()), generate=False) or "")
    if own is None:
        return msgspec.structs.replace(traits, refused={"all": "the template does not write answers as they are"})
    stop = _first_token(renderer.vocabulary, own)
    if stop is None:
        return msgspec.structs.replace(traits, refused={"all": "no token ends an assistant's turn"})
    traits = renderer.traits = msgspec.structs.replace(traits, stop=stop, short_ids=_needs_short_ids(renderer))
    found: dict[str, set[str]] = {}
    for history in _histories():
        calls = history[-1].tool_calls
        for new in _followers(calls):
            found.setdefault(kind_of(calls, new), set()).add(_trouble(renderer, history, new))
    # What the template refuses to write says nothing about what it does write; the bridge asks it each time anyway.
    troubles = {kind: sorted(seen - {FINE, UNRENDERABLE}) for kind, seen in found.items()}
    bridged = frozenset(kind for kind, seen in found.items() if FINE in seen and not troubles[kind])
    return msgspec.structs.replace(
        traits,
        bridged=bridged,
        refused={kind: "; ".join(troubles[kind]) or UNRENDERABLE for kind in found if kind not in bridged},
        overrides=_overrides(renderer),
    )


FINE = ""
UNRENDERABLE = "the template refuses it"


def _trouble(renderer: TemplateRenderer, history: list[Message], new: list[Message]) -> str:
    """Why `new` after `history` is not just appended; FINE where it is."""
    before, whole = _text_or_none(renderer, history[:-1], generate=False), _text_or_none(renderer, [*history, *new])
    if before is None or whole is None:
        return UNRENDERABLE
    tail = renderer.tail(history[-1].tool_calls, new)
    if tail is None:
        return "what follows an answer cannot be told from the answer"
    if not whole.startswith(before):
        return "earlier turns are written differently when a new one comes in"
    if not whole.endswith(tail.close + tail.rest):
        return "how a turn is written depends on the turns before it"
    return FINE


def _overrides(renderer: TemplateRenderer) -> frozenset[str]:
    """What a template moves or strips when the conversation goes on."""
    found = set()
    question, more = Message("user", "one"), Message("user", "two")
    system = Message("system", "Be brief.")
    thinking = Message("assistant", "so", "because of this")
    for name, history, tools in (
        ("system", [system, question, Message("assistant", "so")], ()),
        ("tools", [question, Message("assistant", "so")], (_TOOL,)),
        ("reasoning", [question, thinking], ()),
    ):
        before = _text_or_none(renderer, history[:-1], tools, generate=name == "reasoning")
        whole = _text_or_none(renderer, [*history, more], tools)
        kept = whole is not None and before is not None and whole.startswith(before)
        if name == "reasoning" and renderer.grammar.reasoning:
            kept = kept and "because of this" in (whole or "")
        if not kept:
            found.add(name)
    return frozenset(found)


def _needs_short_ids(renderer: TemplateRenderer) -> bool:
    def fits(call_id: str) -> bool:
        call = ToolCall("look_up", {}, call_id)
        asked = [Message("user", "x"), Message("assistant", "", None, (call,)), _result(call, "y")]
        return _text_or_none(renderer, asked) is not None

    return not fits("call_0123456789abcdef") and fits("abcdef123")


def _text_or_none(
    renderer: TemplateRenderer, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True
) -> str | None:
    try:
        return renderer.text(messages, tools, generate=generate)
    except Unrenderable:
        return None


def _first_token(vocabulary: Vocabulary, text: str) -> str | None:
    """The added token that `text` begins with."""
    fits = [token for token in vocabulary.added.values() if token and text.startswith(token)]
    return max(fits, key=len, default=None)


def proofs() -> list[tuple[list[Message], Tools]]:
    """Conversations that tell one chat format from another: every kind of turn, with and without tools and system."""
    system = Message("system", "Sei kurz.\n")
    found: list[tuple[list[Message], Tools]] = []
    for history in _histories():
        for new in _followers(history[-1].tool_calls)[:3]:
            for start in ([], [system]):
                found.append(([*start, *history, *new], ()))
                found.append(([*start, *history, *new], (_TOOL,)))
    return [([_user(0)], ()), ([system, _user(2)], ()), ([_user(0)], (_TOOL,)), ([system, _user(0)], (_TOOL,)), *found]
