"""How a model family writes reasoning and tool calls, as data.

A form says which literal texts stand where; `infer` learns it from a chat template, `parse` reads answers by it, and
whoever enforces a call builds its grammar from it. White space at the ends of a literal is layout: it is written, but
an answer may have more or less of it there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headrace.tokens.messages import ToolCall


class Reasoning(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a family writes before and after reasoning."""

    open: str = "<think>"
    close: str = "</think>"


#: How most families write reasoning.
THINK = Reasoning()


class JsonObject(msgspec.Struct, frozen=True, tag="json", omit_defaults=True):
    """`{"name": N, "arguments": {...}}`, under these keys, in any order, others beside them."""

    name: str = "name"  # "" where the name itself is the key, and the arguments its value
    arguments: str = "arguments"
    id: str = ""  # the key of an id; "" where none is written
    within: str = ""  # the key of an inner object that holds name and arguments; the id stands outside


class NamedArguments(msgspec.Struct, frozen=True, tag="named", omit_defaults=True):
    """`N after {...}`: the name, a text that ends it, and the arguments as JSON.

    With `until`, a call's id or number stands between `after` and `until`. `id` says what the id is made of: `{id}` is
    what stands there, `{name}` the call's name.
    """

    after: str
    until: str = ""
    id: str = ""


class Parameters(msgspec.Struct, frozen=True, tag="parameters", omit_defaults=True):
    """`N after (open KEY middle VALUE close) ...`: the name, then a text for each argument.

    A string stands there as it is, any other value as JSON. `middle_json`: what stands before a value that is no
    string, in a format that marks which is which.
    """

    after: str
    open: str
    middle: str
    close: str
    between: str = ""
    middle_json: str = ""


class PythonCall(msgspec.Struct, frozen=True, tag="python", omit_defaults=True):
    """`N(key="text", other=2)`, with Python's literals."""


class KeyValues(msgspec.Struct, frozen=True, tag="keyvalues", omit_defaults=True):
    """`N{key:QUOTEtextQUOTE,other:2}`: JSON, but for bare keys and the text that quotes strings."""

    quote: str


class Channels(msgspec.Struct, frozen=True, tag="channels", omit_defaults=True):
    """Harmony: an answer is messages, each with a header that names its channel and, for a call, its recipient.

    `start ROLE channel CHANNEL to=functions.N constrain json message {...} call`. What stands in the channel of
    reasoning is reasoning, a message to a recipient is a call, every other is content.
    """

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    constrain: str = "<|constrain|>"
    end: str = "<|end|>"
    call: str = "<|call|>"
    last: str = "<|return|>"
    reasoning: str = "analysis"
    calls: str = "commentary"
    content: str = "final"
    recipient: str = "functions."


Body = JsonObject | NamedArguments | Parameters | PythonCall | KeyValues | Channels


class CallForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tool calls are written: `begin (open BODY close) between (open BODY close) ... end`.

    Without words in `begin` and `open` a call is bare: it can only be the whole of an answer's content. `lead` may then
    stand before it.
    """

    body: Body
    begin: str = ""
    end: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    lead: str = ""

    @property
    def bare(self) -> bool:
        """Whether no text tells that calls begin."""
        return not isinstance(self.body, Channels) and not any(char.isalpha() for char in self.opener)

    @property
    def opener(self) -> str:
        """The text by which calls are known to begin, up to its first white space."""
        return next(iter((self.begin + " " + self.open).split()), "")

    @property
    def literals(self) -> tuple[str, ...]:
        """Every text of the form that an answer holds as it is."""
        body = [value for value in msgspec.structs.astuple(self.body) if isinstance(value, str)]
        if isinstance(self.body, JsonObject):
            body = []
        around = (self.begin, self.open, *body, self.close, self.between, self.end, self.lead)
        return tuple(text for text in dict.fromkeys(around) if text)

    def written(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the form writes them; "" for none."""
        if not calls:
            return ""
        each = [self.open + _body(self.body, call, n) + self.close for n, call in enumerate(calls)]
        return self.begin + self.between.join(each) + self.end


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a family writes answers. `calls` is None where calls cannot be read, and `unread` says why.

    `content_open` and `content_close` are what some families write around an answer's text.
    """

    reasoning: Reasoning | None = None
    calls: CallForm | None = None
    unread: str = ""
    content_open: str = ""
    content_close: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """What must stay visible in decoded text even where the vocabulary calls it special: each of these texts, and
        the tokens that are spelt within them."""
        thought = (self.reasoning.open, self.reasoning.close) if self.reasoning is not None else ()
        made = self.calls.literals if self.calls is not None else ()
        return tuple(text for text in (*thought, *made, self.content_open, self.content_close) if text)


def _body(body: Body, call: ToolCall, number: int) -> str:
    """One call without what stands around it."""
    arguments = call.written or _json(call.arguments)
    match body:
        case JsonObject():
            inner = {body.name: _json(call.name), body.arguments: arguments} if body.name else {call.name: arguments}
            if body.within:
                inner = {body.within: _object(inner)}
            if body.id:
                inner[body.id] = _json(call.id)
            return _object(inner)
        case NamedArguments():
            between = (_id_part(body.id, call, number) + body.until) if body.until else ""
            return call.name + body.after + between + arguments
        case Parameters():
            values = call.arguments if isinstance(call.arguments, dict) else {}
            each = [_parameter(body, key, value) for key, value in values.items()]
            return call.name + body.after + body.between.join(each)
        case PythonCall():
            values = call.arguments if isinstance(call.arguments, dict) else {}
            return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        case KeyValues():
            return call.name + _key_values(call.arguments if isinstance(call.arguments, dict) else {}, body.quote)
        case Channels():
            header = f"{body.channel}{body.calls} to={body.recipient}{call.name} {body.constrain}json"
            before = f"{body.start}assistant" if number else ""
            return before + header + body.message + arguments + body.call


def _id_part(form: str, call: ToolCall, number: int) -> str:
    """What stands where the id does, so that `form` makes the call's id of it; the call's number where it cannot."""
    before, _, after = form.replace("{name}", call.name).partition("{id}")
    if form and call.id.startswith(before) and call.id.endswith(after) and len(call.id) > len(before) + len(after):
        return call.id[len(before) : len(call.id) - len(after)]
    return str(number)


def _parameter(body: Parameters, key: str, value: Any) -> str:
    middle = body.middle if isinstance(value, str) else body.middle_json or body.middle
    return body.open + key + middle + (value if isinstance(value, str) else _json(value)) + body.close


def _key_values(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_key_values(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_key_values(inner, quote) for inner in value) + "]"
    return quote + value + quote if isinstance(value, str) else _json(value)


def _object(items: dict[str, str]) -> str:
    """A JSON object of values that are JSON text."""
    return "{" + ", ".join(f"{_json(key)}: {value}" for key, value in items.items()) + "}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CutPart = Literal["", "reasoning", "tool_call"]
