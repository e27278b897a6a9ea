"""What a chat template does when a conversation goes on, found by trying every kind of turn.

Templates are programs: some rewrite the past when something new comes in (they strip reasoning, move the system
message or the tools to the last turn, leave turns out), some write a turn differently depending on those before it.
The first is no obstacle: a bridge keeps what was sampled, and `overrides` names what the template would not have kept.
The second is: a kind of turn is bridged only if what a stand-in conversation says of it is what the template writes
at the end of a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.tokens.messages import Message, ToolCall, Unrenderable
from headrace.tokens.renderer import Tools
from headrace.tokens.tails import (
    ANSWER_MARK,
    STAND_IN_TOOL,
    TemplateTail,
    after_mark,
    first_token,
    kind_of,
    leading_tokens,
    own_end,
    stand_in,
    stand_in_tools,
)
from headrace.tokens.vocabulary import Vocabulary


class TemplateTraits(msgspec.Struct, frozen=True):
    """What a probe found out about a template."""

    stop: str = ""  # the token that ends an assistant's turn
    closers: tuple[str, ...] = ()  # the tokens by which a template closes a turn that another follows
    openers: tuple[str, ...] = ()  # the tokens that begin the next turn and so end an answer, where none closes it
    call_stops: tuple[str, ...] = ()  # the tokens that end a turn with calls, where they are others
    short_ids: bool = False  # tool call ids must be nine letters or digits (Mistral)
    text_arguments: bool = False  # calls' arguments must be JSON text
    null_content: bool = False  # calls are written only where the content beside them is null
    needs_tools: bool = False  # nothing can be written without tools
    late_ids: bool = False  # a call's id is written after its arguments
    deep: frozenset[str] = frozenset()  # the kinds whose turns depend on the turns before them
    tooled: frozenset[str] = frozenset()  # the kinds whose turns are written differently where there are tools
    bridged: frozenset[str] = frozenset()  # the kinds of turn for which it is known what to append
    refused: Mapping[str, str] = {}  # the other kinds, and why
    overrides: frozenset[str] = frozenset()  # what the template would not have kept and the bridge keeps


class Probed(Protocol):
    """A renderer being probed; its `traits` are set as they are found."""

    traits: TemplateTraits
    vocabulary: Vocabulary

    @property
    def thinks(self) -> bool: ...

    def text(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True) -> str: ...

    def tail(
        self,
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        earlier: Sequence[Message] = (),
        *,
        tools: bool = False,
        deep: bool | None = None,
    ) -> TemplateTail | None: ...


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
    first = ToolCall(_CALL.name, _CALL.arguments, "firstid12")  # some number calls by where their ids stood first
    asked_first = [_user(0), Message("assistant", "", None, (first,)), _result(first, "found")]
    tooled.append([*asked_first, answers[0], _user(3), asks[0]])
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


DOES_NOT_WRITE = "the template does not write answers as they are"
NO_STOP = "no token ends an assistant's turn"
DEPENDS = "how a turn is written depends on the turns before it"
UNCLEAR = "what follows an answer cannot be told from the answer"
REFUSES = "the template refuses it"


def probe(renderer: Probed, eos: str) -> TemplateTraits:
    """What a template does, found by trying; the renderer's own traits are set on the way. `eos` is the vocabulary's
    token at the end of a text, "" where it has none."""
    renderer.traits = TemplateTraits()
    _find_what_it_takes(renderer)
    offered = stand_in_tools() if renderer.traits.needs_tools else ()
    alone = after_mark(text_or_none(renderer, stand_in(()), offered, generate=False))
    followed = after_mark(text_or_none(renderer, [*stand_in(()), Message("user", "more")], offered))
    if alone is None and followed is None:
        return _set(renderer, refused={"all": DOES_NOT_WRITE})
    _find_ends(renderer, alone or "", followed or "", eos)
    if not renderer.traits.stop:
        return _set(renderer, refused={"all": NO_STOP})
    _find_call_ends(renderer)
    return _find_kinds(renderer)


def _set(renderer: Probed, **found: Any) -> TemplateTraits:
    renderer.traits = msgspec.structs.replace(renderer.traits, **found)
    return renderer.traits


def _find_what_it_takes(renderer: Probed) -> None:
    """How messages must be given to the template."""
    asked = stand_in(())
    needs = (
        text_or_none(renderer, asked[:1]) is None and text_or_none(renderer, asked[:1], stand_in_tools()) is not None
    )
    _set(renderer, needs_tools=needs)
    ids = "call_0123456789abcdef"
    for found in (
        {},
        {"text_arguments": True},
        {"null_content": True},
        {"null_content": True, "text_arguments": True},
        {"short_ids": True},
    ):
        _set(renderer, text_arguments=False, null_content=False, short_ids=False)
        _set(renderer, **found)
        call = ToolCall("look_up", {"mark": ANSWER_MARK}, ids)
        turns = [asked[0], Message("assistant", "", None, (call,)), _result(call, "y")]
        written = text_or_none(renderer, turns, stand_in_tools((call,)) if needs else ())
        if after_mark(written) is not None:
            return
    _set(renderer, text_arguments=False, null_content=False, short_ids=False)


def _find_ends(renderer: Probed, alone: str, followed: str, eos: str) -> None:
    """The tokens that end an answer without calls."""
    added = tuple(renderer.vocabulary.added.values())
    before, after = first_token(alone.lstrip(), added), first_token(followed.lstrip(), added)
    offered = stand_in_tools() if renderer.traits.needs_tools else ()
    written = text_or_none(renderer, stand_in(())[:1], offered, generate=False) or ""
    header, _, ended = written.rpartition("question")
    if after and after != before and after in header and not ended.lstrip().startswith(after):
        # No token of its own ends an answer: the next turn's first one does, whichever turn that is.
        result = after_mark(text_or_none(renderer, [*stand_in(()), _result(_CALL, "y")], offered)) or ""
        openers = tuple(dict.fromkeys(filter(None, (after, first_token(result.lstrip(), added)))))
        _set(renderer, stop=eos or after, openers=openers)
        return
    shared = own_end([alone, followed], added) if before == after else ""
    # Where several tokens end an answer, as Command R's, the turn's end is the one that ends texts.
    last = eos if eos in (token for _, token in leading_tokens(shared, added)) else ""
    stop = last or before or after or eos
    after = last or after
    _set(renderer, stop=stop, closers=tuple(dict.fromkeys(filter(None, (stop, after)))))


def _find_call_ends(renderer: Probed) -> None:
    """Whether a call's id stands behind its arguments, and which token ends a turn with calls if another does."""
    one, other = ToolCall("f", {}, "abcdef123"), ToolCall("f", {}, "ABCDEF789")
    needs = renderer.traits.needs_tools

    def written(*calls: ToolCall) -> str | None:
        return text_or_none(renderer, stand_in(calls), stand_in_tools(calls) if needs else (), generate=False)

    first = written(one)
    _set(renderer, late_ids=after_mark(first) != after_mark(written(other)))
    tail = renderer.tail((one,), [_result(one, "y")])
    if tail is None or not tail.token or tail.token in (*renderer.traits.closers, *renderer.traits.openers):
        return
    answer, rest = (first or "").rpartition("question")[2], tail.rest.lstrip()
    both = written(one, other)
    between, told, _ = (both or "").rpartition("question")[2].partition(ANSWER_MARK)
    between = between if told else ""  # of several calls, it writes the first alone
    follows = first_token(rest, tuple(renderer.vocabulary.added.values()))
    # A token that also stands between calls, or before an opener, ends a call and not the turn.
    if answer.count(tail.token) == 1 and tail.token not in between and follows not in renderer.traits.openers:
        _set(renderer, call_stops=(tail.token,))


def _find_kinds(renderer: Probed) -> TemplateTraits:
    """Which kinds of turn can be bridged, and how."""
    pairs: dict[str, list[tuple[list[Message], list[Message]]]] = {}
    for history in _histories():
        for new in _followers(history[-1].tool_calls):
            pairs.setdefault(kind_of(history[-1].tool_calls, new), []).append((history, new))
    deep, tooled, refused, rewritten = set(), set(), {}, False
    for kind, tried in pairs.items():
        written = [(history, new, _whole(renderer, history, new)) for history, new in tried]
        known = [(history, new, whole) for history, new, whole in written if isinstance(whole, str)]
        moved = [pair for pair in known if _moves_text(renderer, *pair)]
        known = [pair for pair in known if pair not in moved]
        rewritten = rewritten or bool(moved)
        if not known:
            refused[kind] = f"{REFUSES}: {next(str(why) for *_, why in written)}"
            continue
        rewritten = rewritten or any(_rewrites(renderer, history, whole) for history, _, whole in known)
        fits = {_fits(renderer, history, new, whole, deep=False) for history, new, whole in known}
        if fits == {""}:
            if _differs_with_tools(renderer, *known[0][:2]):
                tooled.add(kind)
            continue
        if {_fits(renderer, history, new, whole, deep=True) for history, new, whole in known} == {""}:
            deep.add(kind)
            continue
        refused[kind] = "; ".join(sorted(fits - {""}))
    overrides = {*_overrides(renderer), *(("turns",) if rewritten else ())}
    return _set(
        renderer,
        deep=frozenset(deep),
        tooled=frozenset(tooled),
        bridged=frozenset(kind for kind in pairs if kind not in refused),
        refused=refused,
        overrides=frozenset(overrides),
    )


def _whole(renderer: Probed, history: list[Message], new: list[Message]) -> str | Unrenderable:
    messages = [*history, *new]
    calls = [call for message in messages for call in message.tool_calls]
    try:
        return renderer.text(messages, stand_in_tools(calls) if renderer.traits.needs_tools else ())
    except Unrenderable as error:
        return error


def _rewrites(renderer: Probed, history: list[Message], whole: str) -> bool:
    """Whether the turns before an answer are no longer written as they were when it was asked for."""
    calls = [call for message in history for call in message.tool_calls]
    offered = stand_in_tools(calls) if renderer.traits.needs_tools else ()
    asked = [text_or_none(renderer, history[:-1], offered, generate=generate) for generate in (True, False)]
    return not any(text is not None and whole.startswith(text) for text in asked) and any(asked)


def _moves_text(renderer: Probed, history: list[Message], new: list[Message], whole: str) -> bool:
    """Whether a template writes text beside calls elsewhere than before them, or for them: what follows such an answer
    is then no longer what follows its calls, as it was when the answer was sampled."""
    answer = history[-1]
    if not (answer.content and answer.tool_calls) or not _fits(renderer, history, new, whole, deep=True):
        return False
    bare = [*history[:-1], msgspec.structs.replace(answer, content="")]
    alone = _whole(renderer, bare, new)
    return isinstance(alone, str) and not _fits(renderer, bare, new, alone, deep=True)


def _fits(renderer: Probed, history: list[Message], new: list[Message], whole: str, *, deep: bool) -> str:
    """Why what would be appended is not what the template writes at the end of `whole`; "" where it is."""
    tail = renderer.tail(history[-1].tool_calls, new, history[:-1], deep=deep)
    if tail is None:
        return UNCLEAR
    # A token that ends a call is the model's own, also where the template does not write calls beside text.
    ends_call = history[-1].tool_calls and tail.token not in renderer.traits.closers
    return "" if whole.endswith(tail.rest if ends_call else tail.text) else DEPENDS


def _differs_with_tools(renderer: Probed, history: list[Message], new: list[Message]) -> bool:
    calls = history[-1].tool_calls
    plain = renderer.tail(calls, new, deep=False)
    after = after_mark(text_or_none(renderer, [*stand_in(calls), *new], stand_in_tools(calls)))
    return plain is not None and after is not None and STAND_IN_TOOL not in after and not after.endswith(plain.text)


def _overrides(renderer: Probed) -> set[str]:
    """What a template moves or strips when the conversation goes on."""
    found = set()
    question, more = Message("user", "one"), Message("user", "two")
    system = Message("system", "Be brief.")
    thinking = Message("assistant", "so", "because of this")
    needs = renderer.traits.needs_tools
    for name, history, tools in (
        ("system", [system, question, Message("assistant", "so")], ()),
        ("tools", [question, Message("assistant", "so")], (_TOOL,)),
        ("reasoning", [question, thinking], ()),
    ):
        offered = tools or (stand_in_tools() if needs else ())
        whole = text_or_none(renderer, [*history, more], offered)
        asked = [text_or_none(renderer, history[:-1], offered, generate=generate) for generate in (True, False)]
        if whole is None or not any(asked):
            continue  # what it does not write, it does not move either
        kept = any(text is not None and whole.startswith(text) for text in asked)
        if name == "reasoning" and renderer.thinks:
            kept = asked[0] is not None and whole.startswith(asked[0]) and "because of this" in whole
        if not kept:
            found.add(name)
    return found


def text_or_none(
    renderer: Probed, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True
) -> str | None:
    """The prompt as text; None where the template refuses it."""
    try:
        return renderer.text(messages, tools, generate=generate)
    except Unrenderable:
        return None


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
