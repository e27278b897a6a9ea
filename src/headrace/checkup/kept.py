"""In what a prompt that continues what was sampled differs from the one that the chat template would write now."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from headrace.tokens import Message
from headrace.tokens.forms import Grammar

_PIECES = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\s+|\w+|.")
#: What may be kept, by name, and what that means.
KINDS = {
    "reasoning": "earlier reasoning, which the template strips",
    "white space": "the white space that was sampled or written first",
    "system": "the system message where it stood first",
    "instructions": "the instructions that the template writes before the last answer only, before every one",
    "tools": "the tools where they stood first",
    "ids": "the ids of calls as they were sampled",
    "markers": "the markers that were sampled or written first",
    "text beside calls": "where the text beside calls stood",
}


def kept(
    ours: str,
    template: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    grammar: Grammar,
    movable: Mapping[str, str],
) -> set[str]:
    """The names of what differs between our prompt and the template's; a difference without a name is told as it is.

    `movable` are texts that a template may write elsewhere, by the name of what they are.
    """
    moved = {name for name, text in movable.items() if text and ours.find(text) != template.find(text)}
    for name in moved:
        ours, template = ours.replace(movable[name], ""), template.replace(movable[name], "")
    return moved | _differences(ours, template, messages, tools, grammar)


def _differences(
    ours: str, template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], grammar: Grammar
) -> set[str]:
    if ours == template:
        return set()
    mine, theirs = _PIECES.findall(ours), _PIECES.findall(template)
    found: set[str] = set()
    for kind, a, b, c, d in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if kind != "equal":
            found.add(_name("".join(mine[a:b]), "".join(theirs[c:d]), messages, tools, grammar))
    return found


def _name(
    ours: str, template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], grammar: Grammar
) -> str:
    both = ours + template
    if not both.strip():
        return "white space"
    marks = () if grammar.reasoning is None else (grammar.reasoning.open.strip(), grammar.reasoning.close.strip())
    thoughts = [message.reasoning for message in messages if message.reasoning]
    if any(mark and mark in both for mark in marks) or any(both.strip() in thought for thought in thoughts):
        return "reasoning"
    if any(thought in both for thought in thoughts):
        return "reasoning"
    if any(call.id and both.strip() in call.id for message in messages for call in message.tool_calls):
        return "ids"
    if any(str(tool["function"].get("description")) in both for tool in tools):
        return "tools"
    if any(message.content and message.content in both for message in messages if message.role == "system"):
        return "system"
    spoken = re.sub(r"<[^<>\s]+>|\[/?[A-Z_]+\]", "", both).strip()
    if spoken and any(spoken == message.content.strip() for message in messages if message.tool_calls):
        return "text beside calls"
    if not re.sub(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\s+", "", both):
        return "markers"
    return f"{ours!r} for {template!r}"
