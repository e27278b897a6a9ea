"""What a template writes after an answer, asked of the template in short stand-in conversations.

A stand-in's answer is, or ends with, a mark; what is written after the mark is the template's. Of that, the end of a
tool call (closing quotes and brackets) is the model's own; the rest is a tail: what ends the turn, then what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.tokens.messages import Message, ToolCall

#: Stands for what the model sampled. No template writes it of its own, and it survives any JSON encoding.
ANSWER_MARK = "headraceanswermark"
#: The name of the tool that is offered to templates that fail without tools; no tail may hold it.
STAND_IN_TOOL = "headracestandintool"
STAND_IN_QUESTION, MARKED_TEXT = Message("user", "question"), Message("assistant", ANSWER_MARK)


class TemplateTail(msgspec.Struct, frozen=True):
    """What a template writes after an answer: what ends the answer's turn, then the new messages."""

    gap: str  # what stands between the answer and the token: white space, as a rule
    token: str  # the added token that ends the turn, "" where none does
    rest: str
    opens: bool = False  # the token does not end this turn but begins the next, as GLM's roles do

    @property
    def text(self) -> str:
        """All of it but the gap."""
        return self.token + self.rest


def stand_in(calls: Sequence[ToolCall]) -> list[Message]:
    """A short conversation that ends with an answer that is, or whose last call ends with, the mark."""
    return [STAND_IN_QUESTION, marked_answers(calls)[0]]


def marked_answers(calls: Sequence[ToolCall]) -> list[Message]:
    """Answers that are, or whose last call ends with, the mark; behind the first, those for templates that do not write
    it so: with the mark in the first call, where only one is written, and as text, where none is."""
    text = MARKED_TEXT
    if not calls:
        return [text]
    marked = [
        tuple(ToolCall(call.name, {"mark": ANSWER_MARK} if n == at else {}, call.id) for n, call in enumerate(calls))
        for at in dict.fromkeys((len(calls) - 1, 0))
    ]
    return [*(Message("assistant", "", None, made) for made in marked), text]


def stand_in_tools(calls: Sequence[ToolCall] = ()) -> list[dict[str, Any]]:
    """A tool for templates that fail without, and one of each name that was called."""
    parameters = {"type": "object", "properties": {"mark": {"type": "string", "description": "mark"}}}
    return [
        {"type": "function", "function": {"name": name, "description": STAND_IN_TOOL, "parameters": parameters}}
        for name in (STAND_IN_TOOL, *dict.fromkeys(call.name for call in calls))
    ]


def kind_of(calls: Sequence[ToolCall], new: Sequence[Message]) -> str:
    """The kind of a turn: what came after what."""
    roles: list[str] = []
    for message in new:
        if not roles or roles[-1] != message.role:
            roles.append(message.role)
    return ("calls>" if calls else "answer>") + "+".join(roles)


def after_mark(text: str | None) -> str | None:
    """What follows the mark; None where it is not there."""
    _, found, after = (text or "").partition(ANSWER_MARK)
    return after if found else None


def own_end(texts: Sequence[str], added: Iterable[str]) -> str:
    """The part after the mark that all of `texts` share, whatever follows: the call's own end, and its turn's.

    Where the texts part in the middle of a token, that token is not part of it.
    """
    first, last = min(texts), max(texts)
    same = (a == b for a, b in zip(first, last, strict=False))
    shared = first[: next((n for n, equal in enumerate(same) if not equal), min(len(first), len(last)))]
    if shared in texts:
        return shared
    ends = [shared.rfind(token) + len(token) for token in added if token in shared]
    return shared[: max(ends, default=0)]


def tail_after_calls(after: str, own: str, closers: Sequence[str], added: Iterable[str]) -> TemplateTail | None:
    """The tail of an answer that made calls: from the token that ends a turn; where none does, from the call's end."""
    if not after.startswith(own):
        return None
    found = [(own.find(token), token) for token in closers if token and token in own]
    if found:
        at, token = min(found, key=lambda item: (item[0], -len(item[1])))
        return TemplateTail("", token, after[at + len(token) :])
    token = last_token(own, added)
    at = own.rfind(token) + len(token) if token else len(own)
    return TemplateTail("", token, after[at:])


def tail_after_text(after: str, closers: Sequence[str], openers: Sequence[str], added: Sequence[str]) -> TemplateTail:
    """The tail of an answer without calls: all that follows the mark."""
    tokens = leading_tokens(after, added)
    if not tokens:
        return TemplateTail("", "", after)
    at, token = next((item for item in tokens if item[1] in closers), tokens[0])
    return TemplateTail(after[:at], token, after[at + len(token) :], token in openers)


def leading_tokens(text: str, added: Sequence[str]) -> list[tuple[int, str]]:
    """The added tokens that a text begins with, with nothing but white space around them, and where they stand."""
    found: list[tuple[int, str]] = []
    at = 0
    while True:
        at = len(text) - len(text[at:].lstrip())
        token = first_token(text[at:], added)
        if not token:
            return found
        found.append((at, token))
        at += len(token)


def first_token(text: str, added: Iterable[str]) -> str:
    """The added token that `text` begins with; "" where it begins with none."""
    tokens = tuple(added)
    if not text.startswith(tokens):
        return ""  # nearly always, and some models have a thousand of them
    return max([token for token in tokens if token and text.startswith(token)], key=len, default="")


def last_token(text: str, added: Iterable[str]) -> str:
    """The added token that `text` ends with, but for white space; "" where it ends with none."""
    bare = text.rstrip()
    return max((token for token in added if token and bare.endswith(token)), key=len, default="")
