"""Answers whose parts are known, as a chat template writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.tokens.messages import ToolCall

#: Messages, tools and whether an answer is to follow; the text of a prompt. May raise anything.
Write = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

#: Fields in which templates look for an answer's reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
#: Tokens that end a turn with calls although another ends a plain answer.
CALL_ENDS = ("<|eom_id|>", "<|tool_response>")
#: Texts that no template writes of its own.
CONTENT, THOUGHT = "headracecontentmark", "headracethoughtmark"

_ATOM = re.compile(r"<[^<>\s]*>?|\[[^\[\]\s]*\]?|\s+|[^<\[\s]+")
_STRING = {"type": "string"}
_PROPERTIES: dict[str, Any] = {
    "key_one": _STRING,
    "key_two": _STRING,
    "text": _STRING,
    "other": _STRING,
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "nested": {"type": "object"},
    "items": {"type": "array", "items": _STRING},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does what it is asked to do.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for name in ("fetch_alpha", "count_beta")
]


class Quirks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a template needs to write calls at all, against what most take."""

    text_arguments: bool = False  # arguments as JSON text, not as an object
    null_content: bool = False  # content that is null, not empty, beside calls
    ids: str = ""  # the form of ids: "" for any; "short" for nine letters and digits; "{name}" and "{id}" as written
    most_calls: int = 0  # how many calls it writes in one answer; 0 for any number


class SampleAnswer(NamedTuple):
    """An answer whose parts are known."""

    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]


class Written(NamedTuple):
    """An answer as a template writes it: the prompt before it, its text, and what ends its turn."""

    prompt: str
    text: str


class Author:
    """A template that is asked to write answers, with what it needs for that."""

    def __init__(self, write: Write, tokens: Collection[str], template: str) -> None:
        self._write = write
        self._template = template
        self._tokens = tokens
        self._user = [{"role": "user", "content": "question"}]
        self.tools: list[dict[str, Any]] | None = TOOLS
        self.quirks = Quirks()
        plain = {"role": "assistant", "content": CONTENT}
        whole = self._try([*self._user, plain])
        if whole is None or CONTENT not in whole:
            self.tools = None
            whole = self._try([*self._user, plain])
        self.before, _, self.tail = (whole or "").partition(CONTENT)
        self.prompt = self._try(self._user, generate=True) or self.before
        ends = (atom for atom in atoms(self.tail) if atom.strip())
        self._stops = tuple(atom for atom in ends if atom in tokens or (len(atom) > 3 and atom[0] in "<["))

    def knows(self, mark: str) -> bool:
        """Whether the vocabulary or the template has a mark."""
        return mark in self._tokens or mark in self._template

    def _try(self, messages: list[dict[str, Any]], *, generate: bool = False) -> str | None:
        try:
            return str(self._write(messages, self.tools, generate))
        except Exception:  # templates are programs of strangers and may raise anything
            return None

    def written(self, sample: SampleAnswer) -> Written | None:
        """An answer's text after its prompt, without what ends a turn; None where the template refuses it."""
        whole = self._try([*self._user, self._message(sample)])
        if whole is None:
            return None
        prompt = self.prompt
        if not whole.startswith(prompt):
            prompt = "".join(common_atoms(atoms(self.before), atoms(whole)))
        text = self._first_turn(whole[len(prompt) :])
        last = sample.calls[-1].name if sample.calls else sample.content
        # What a template spreads over several turns is no answer that could be sampled.
        return Written(prompt, text) if last in text or last not in whole[len(prompt) :] else None

    def _first_turn(self, text: str) -> str:
        if self.tail and text.endswith(self.tail):
            text = text[: len(text) - len(self.tail)]
        ends = [at for stop in (*self._stops, *CALL_ENDS) if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))]

    def _message(self, sample: SampleAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": sample.content}
        if sample.reasoning is not None:
            message |= dict.fromkeys(REASONING_FIELDS, sample.reasoning)
        if sample.calls:
            if self.quirks.null_content and not sample.content:
                message["content"] = None
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": self.call_id(call, n),
                    "function": {
                        "name": call.name,
                        "arguments": json_text(call.arguments) if self.quirks.text_arguments else call.arguments,
                    },
                }
                for n, call in enumerate(sample.calls)
            ]
        return message

    def call_id(self, call: ToolCall, number: int) -> str:
        """The id of a sample's call."""
        form = self.quirks.ids
        if form == "short":
            return f"abcDEF12{number}"
        return form.replace("{name}", call.name).replace("{id}", str(number)) if form else f"call_id_number_{number}"


def held_out() -> list[SampleAnswer]:
    """Answers of every kind that play no part in finding a form."""
    odd = {"text": 'He said "hi" \\ and\n\tleft: {x} é 日本 🙂 & <b>', "other": ""}
    typed = {"count": -3, "share": 2.5, "flag": True, "text": "yes"}
    deep = {"nested": {"a": [1, {"b": None}], "c": 'd "e"'}, "items": ["x", 2, False]}
    one = ToolCall("fetch_alpha", {"text": "plain words, and more"})
    calls = [
        (one,),
        (ToolCall("fetch_alpha", odd),),
        (ToolCall("count_beta", typed),),
        (ToolCall("fetch_alpha", {"text": "12", "other": "true"}),),
        (ToolCall("count_beta", deep),),
        (ToolCall("count_beta", {}),),
        (one, ToolCall("count_beta", typed)),
        (ToolCall("count_beta", {"count": 1}), one, ToolCall("fetch_alpha", odd)),
    ]
    found = [SampleAnswer("", None, made) for made in calls]
    found += [SampleAnswer("Let me see.", None, made) for made in (calls[0], calls[6])]
    found += [SampleAnswer("", "It must be\n\nlooked up.", calls[0]), SampleAnswer("Well, 日本.", "Because.", calls[6])]
    return [*found, SampleAnswer("Just text.\n\nOf two lines.", None, ()), SampleAnswer("So.", "Since\nit is.", ())]


def atoms(text: str) -> list[str]:
    """A text in pieces that belong together: marks, words, white space."""
    return _ATOM.findall(text)


def common_atoms(first: Sequence[str], second: Sequence[str]) -> list[str]:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return list(first[:count])


def json_text(value: Any) -> str:
    """A value as JSON text, as templates write it."""
    return json.dumps(value, ensure_ascii=False)
