"""A chat template's form of reasoning and tool calls, learned from what it writes.

The template writes answers whose calls are known; where their names, keys and values stand tells how a call is written,
and what stands between two calls tells what is around each and what around all. A form is taken only if answers that
played no part in finding it, written by the template, are read back as they were meant, at once and character by
character. What cannot be learned that way may be declared (`declared`), and is then tried by the same round trips.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.tokens.bodies import ParameterTypes, parameter_types, reader_of
from headrace.tokens.channels import parser_of
from headrace.tokens.declared import DECLARED, KNOWN_REASONING, Declared
from headrace.tokens.forms import (
    Body,
    CallForm,
    Grammar,
    JsonObject,
    KeyValues,
    NamedArguments,
    Parameters,
    PythonCall,
    Reasoning,
)
from headrace.tokens.messages import ToolCall
from headrace.tokens.parse import AnswerDelta, CallDelta, Parsed

#: Messages, tools and whether an answer is to follow; the text of a prompt. May raise anything.
Write = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, bool], str]

_ATOM = re.compile(r"<[^<>\s]*>?|\[[^\[\]\s]*\]?|\s+|[^<\[\s]+")
_CONTENT, _THOUGHT = "headracecontentmark", "headracethoughtmark"
#: Fields in which templates look for an answer's reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
#: A token that some models write before a bare call.
LEAD = "<|python_tag|>"
#: Tokens that end a turn with calls although another ends a plain answer.
CALL_ENDS = ("<|eom_id|>", "<|tool_response>")
_UNWRITTEN = "its chat template writes no tool calls"

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
_TYPES: ParameterTypes = parameter_types(TOOLS)
_TWO_STRINGS = {"key_one": "first_value", "key_two": "second_value"}


class Quirks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a template needs to write calls at all, against what most take."""

    text_arguments: bool = False  # arguments as JSON text, not as an object
    null_content: bool = False  # content that is null, not empty, beside calls
    ids: str = ""  # the form of ids: "" for any; "short" for nine letters and digits; "{name}" and "{id}" as written
    most_calls: int = 0  # how many calls it writes in one answer; 0 for any number


class Inference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learned of a template. `found` says how: "inferred", or the name of a declaration."""

    grammar: Grammar
    quirks: Quirks = Quirks()
    found: str = ""


class Sample(NamedTuple):
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
        plain = {"role": "assistant", "content": _CONTENT}
        whole = self._try([*self._user, plain])
        if whole is None or _CONTENT not in whole:
            self.tools = None
            whole = self._try([*self._user, plain])
        self.before, _, self.tail = (whole or "").partition(_CONTENT)
        self.prompt = self._try(self._user, generate=True) or self.before
        self._stops = tuple(atom for atom in _atoms(self.tail) if atom.strip() and (atom in tokens or atom[0] in "<["))

    def knows(self, mark: str) -> bool:
        """Whether the vocabulary or the template has a mark."""
        return mark in self._tokens or mark in self._template

    def _try(self, messages: list[dict[str, Any]], *, generate: bool = False) -> str | None:
        try:
            return str(self._write(messages, self.tools, generate))
        except Exception:  # templates are programs of strangers and may raise anything
            return None

    def written(self, sample: Sample) -> Written | None:
        """An answer's text after its prompt, without what ends a turn; None where the template refuses it."""
        whole = self._try([*self._user, self._message(sample)])
        if whole is None:
            return None
        prompt = self.prompt
        if not whole.startswith(prompt):
            prompt = "".join(_common_atoms(_atoms(self.before), _atoms(whole)))
        text = self._first_turn(whole[len(prompt) :])
        last = sample.calls[-1].name if sample.calls else sample.content
        # What a template spreads over several turns is no answer that could be sampled.
        return Written(prompt, text) if last in text or last not in whole[len(prompt) :] else None

    def _first_turn(self, text: str) -> str:
        if self.tail and text.endswith(self.tail):
            text = text[: len(text) - len(self.tail)]
        ends = [at for stop in (*self._stops, *CALL_ENDS) if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=len(text))]

    def _message(self, sample: Sample) -> dict[str, Any]:
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
                        "arguments": _json(call.arguments) if self.quirks.text_arguments else call.arguments,
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


def infer(write: Write, tokens: Collection[str], template: str) -> Inference:
    """How a template writes answers. `tokens` are the vocabulary's added tokens."""
    author = Author(write, tokens, template)
    reasoning = _reasoning(author, tokens, template)
    content_open, content_close = _around_content(author, reasoning)
    base = Grammar(reasoning, None, "", content_open, content_close)
    writes = _find_quirks(author)
    for declared in DECLARED:
        if declared.first and declared.fits(tokens, template) and not _trouble(author, declared.grammar):
            return Inference(declared.grammar, author.quirks, declared.name)
    troubles = []
    if writes:
        for form in _forms(author):
            grammar = msgspec.structs.replace(base, calls=form)
            trouble = _trouble(author, grammar)
            if not trouble:
                return Inference(grammar, author.quirks, "inferred")
            troubles.append(trouble)
    for declared in DECLARED:
        if not declared.fits(tokens, template) or declared.first:
            continue
        grammar = _with_declared(base, declared)
        if not writes or not _trouble(author, grammar):
            return Inference(grammar, author.quirks, declared.name)
    unread = _UNWRITTEN if not writes else "its chat template writes tool calls in a way that could not be read back"
    if troubles:
        unread += f": {troubles[0]}"
    return Inference(msgspec.structs.replace(base, unread=unread), author.quirks)


def _with_declared(base: Grammar, declared: Declared) -> Grammar:
    given = declared.grammar
    return msgspec.structs.replace(base, calls=given.calls, reasoning=given.reasoning or base.reasoning)


def _find_quirks(author: Author) -> bool:
    """Finds what the template needs to write calls; whether it then does."""
    one = Sample("", None, (ToolCall("fetch_alpha", _TWO_STRINGS),))
    for ids in ("", "short", "functions.{name}:{id}"):
        for null_content in (False, True):
            for text_arguments in (False, True):
                author.quirks = Quirks(text_arguments, null_content, ids)
                written = author.written(one)
                if written is None or not all(part in written.text for part in ("fetch_alpha", *_TWO_STRINGS)):
                    continue
                if '\\"key_one\\"' in written.text:
                    continue  # JSON within a JSON string: it wants the object
                author.quirks = msgspec.structs.replace(author.quirks, most_calls=_most_calls(author))
                return True
    author.quirks = Quirks()
    return False


def _most_calls(author: Author) -> int:
    """How many calls the template writes in one answer, of up to three; 0 where all of them."""
    calls = tuple(ToolCall("fetch_alpha", {"key_one": f"value_number_{n}"}) for n in range(3))
    for most in (3, 2):
        written = author.written(Sample("", None, calls[:most]))
        if written is not None and all(call.arguments["key_one"] in written.text for call in calls[:most]):
            return 0 if most == 3 else most
    return 1


# Where a call stands in a text, by how its body may be written.


class Found(NamedTuple):
    body: Body
    start: int
    end: int


Locate = Callable[[str, ToolCall, str, int], Found | None]


def _in_json(text: str, call: ToolCall, call_id: str, start: int) -> Found | None:
    """The call as a JSON object."""
    decoder = json.JSONDecoder()
    at = text.find("{", start)
    last = text.find(call.name, start)
    while 0 <= at < last:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            value, end = None, at
        body = _json_body(value, call, call_id)
        if body is not None:
            return Found(body, at, end)
        at = text.find("{", at + 1)
    return None


def _json_body(value: Any, call: ToolCall, call_id: str) -> JsonObject | None:
    if not isinstance(value, dict):
        return None
    if list(value) == [call.name] and value[call.name] == call.arguments:
        return JsonObject("")
    names = [key for key, item in value.items() if item == call.name]
    given = [key for key, item in value.items() if item in (call.arguments, _json(call.arguments))]
    ids = [key for key, item in value.items() if item == call_id]
    if names and given:
        return JsonObject(names[0], given[0], ids[0] if ids else "")
    for key, item in value.items():
        inner = _json_body(item, call, call_id)
        if inner is not None and not inner.within and inner.name:
            return JsonObject(inner.name, inner.arguments, ids[0] if ids else "", key)
    return None


def _in_named_arguments(text: str, call: ToolCall, call_id: str, start: int) -> Found | None:
    """The name, then the arguments as JSON."""
    at = text.find(call.name, start)
    brace = text.find("{", at + len(call.name))
    if at < 0 or brace < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, brace)
    except ValueError:
        return None
    if value != call.arguments:
        return None
    between = text[at + len(call.name) : brace]
    if call_id in between:  # a name, its id, its arguments
        after, _, until = between.partition(call_id)
        return Found(NamedArguments(after, until, "{id}"), at, end) if after.strip() and until.strip() else None
    numbered = re.match(r"([:#_-])(\d+)(\D.*)", between, re.DOTALL)
    if numbered and numbered[3].strip():  # an id that is made of the name and a number
        own = re.search(r"[\w.]*$", text[:at])
        form = f"{own[0] if own else ''}{{name}}{numbered[1]}{{id}}"
        return Found(NamedArguments(numbered[1], numbered[3], form), at, end)
    return Found(NamedArguments(between), at, end)


def _in_python(text: str, call: ToolCall, call_id: str, start: int) -> Found | None:
    at = text.find(call.name + "(", start)
    return _read_to_its_end(PythonCall(), text, at) if at >= 0 else None


def _in_key_values(text: str, call: ToolCall, call_id: str, start: int) -> Found | None:
    at = text.find(call.name + "{", start)
    if at < 0 or not call.arguments:
        return None
    key = next(iter(call.arguments))
    rest = text[at + len(call.name) + 1 :]
    value = call.arguments[key]
    if not rest.startswith(key + ":"):
        return None
    before = rest[len(key) + 1 :].partition(str(value))[0]
    quote = before if isinstance(value, str) else '"'
    return _read_to_its_end(KeyValues(quote), text, at) if quote.strip() else None


def _read_to_its_end(body: Body, text: str, at: int) -> Found | None:
    reader = reader_of(CallForm(body), {})()
    end = reader.feed(text, at)
    return Found(body, at, end) if reader.done else None


def _forms(author: Author) -> Iterator[CallForm]:
    """Forms that what the template writes may be, the likelier first."""
    first, second = ToolCall("fetch_alpha", _TWO_STRINGS), ToolCall("count_beta", _TWO_STRINGS)
    one = author.written(Sample("", None, (first,)))
    two = author.written(Sample("", None, (first, second))) if author.quirks.most_calls != 1 else None
    if one is None:
        return
    for locate in (_in_json, _in_named_arguments, _in_python, _in_key_values):
        form = _framed(author, locate, one.text, two.text if two else None, (first, second))
        if form is not None:
            yield msgspec.structs.replace(form, lead=LEAD) if form.bare and author.knows(LEAD) else form
    yield from _parameter_forms(author, one.text, two.text if two else None)


def _framed(
    author: Author, locate: Locate, one: str, two: str | None, calls: tuple[ToolCall, ToolCall]
) -> CallForm | None:
    """The form around bodies that are found by `locate`."""
    found = locate(one, calls[0], author.call_id(calls[0], 0), 0)
    if found is None:
        return None
    before, after = _after_thought(one[: found.start]), one[found.end :]
    if two is not None:
        first = locate(two, calls[0], author.call_id(calls[0], 0), 0)
        second = locate(two, calls[1], author.call_id(calls[1], 1), first.end) if first is not None else None
        if first is not None and second is not None:
            middle = two[first.end : second.start]
            return _around(found.body, _after_thought(two[: first.start]), middle, two[second.end :])
    form = CallForm(found.body, open=before.lstrip(), close=after.rstrip())
    return form if not form.bare or isinstance(found.body, JsonObject) else None


def _around(body: Body, before: str, middle: str, after: str) -> CallForm:
    """A form by what stands before the first of two bodies, between them, and after the last."""
    if not any(char.isalpha() for char in middle):  # layout, or the comma of a list
        return CallForm(body, begin=before.lstrip(), end=after.rstrip(), between=middle)
    opened = _common_atoms(_atoms(before)[::-1], _atoms(middle)[::-1])[::-1]
    rest = _atoms(middle)[: len(_atoms(middle)) - len(opened)]
    closed = _common_atoms(rest, _atoms(after))
    begin, end = _atoms(before)[: len(_atoms(before)) - len(opened)], _atoms(after)[len(closed) :]
    return CallForm(
        body,
        begin="".join(begin).lstrip(),
        end="".join(end).rstrip(),
        open="".join(opened).lstrip(),
        close="".join(closed).rstrip(),
        between="".join(rest[len(closed) :]),
    )


def _parameter_forms(author: Author, one: str, two: str | None) -> Iterator[CallForm]:
    """Forms with a text for each argument: what is around keys and values, by an answer with two of them."""
    first, second = ToolCall("fetch_alpha", _TWO_STRINGS), ToolCall("count_beta", _TWO_STRINGS)
    found = _parameters(author, one, first, 0)
    if found is None:
        return
    body, start, end = found
    before, after = _after_thought(one[:start]), one[end:]
    if two is not None:
        again = _parameters(author, two, second, 0)
        place = two.find(first.name)
        if again is not None and place >= 0:
            ended = place + (end - start)
            yield _around(body, _after_thought(two[:place]), two[ended : again.start], two[again.end :])
            return
    yield CallForm(body, open=before.lstrip(), close=after.rstrip())


def _parameters(author: Author, text: str, call: ToolCall, start: int) -> Found | None:
    at = text.find(call.name, start)
    places = []
    here = at + len(call.name)
    for key, value in _TWO_STRINGS.items():
        key_at = text.find(key, here)
        value_at = text.find(value, key_at + len(key))
        if min(at, key_at, value_at) < 0:
            return None
        places.append((key_at, key_at + len(key), value_at, value_at + len(value)))
        here = value_at + len(value)
    (first_key, first_key_end, first_value, first_value_end), (next_key, _, _, last_end) = places
    head = text[at + len(call.name) : first_key]
    middle = text[first_key_end:first_value]
    parting = _atoms(text[first_value_end:next_key])
    opened = _common_atoms(_atoms(head)[::-1], parting[::-1])[::-1]
    none = author.written(Sample("", None, (ToolCall(call.name, {}),)))
    if none is not None and call.name in none.text:  # what a call without arguments has after its name, ends the name
        bare_head = _atoms(none.text[none.text.find(call.name) + len(call.name) :])
        after_name = _common_atoms(_atoms(head), bare_head)
        opened = opened if len(opened) + len(after_name) <= len(_atoms(head)) else _atoms(head)[len(after_name) :]
    after = "".join(_atoms(head)[: len(_atoms(head)) - len(opened)])
    closed = parting[: len(parting) - len(opened)]
    closed = _common_atoms(closed, _atoms(text[last_end:]))
    close = "".join(closed).rstrip()
    between = "".join(parting[len(closed) : len(parting) - len(opened)])
    if not "".join(opened).strip() or not middle.strip() or not close.strip():
        return None
    body = Parameters(after, "".join(opened).lstrip(), middle, close, between, _json_middle(author, call, middle))
    return Found(body, at, last_end + len(close))


def _json_middle(author: Author, call: ToolCall, middle: str) -> str:
    """What stands between a key and a value that is no string, where it differs."""
    written = author.written(Sample("", None, (ToolCall(call.name, {"count": 170017}),)))
    if written is None:
        return ""
    at = written.text.find("count", written.text.find(call.name) + len(call.name))
    value = written.text.find("170017", at)
    found = written.text[at + len("count") : value] if 0 <= at < value else ""
    return found if found != middle else ""


def _after_thought(text: str) -> str:
    """Text before calls, without a block of reasoning that the template writes for an answer that has none."""
    for known in KNOWN_REASONING:
        if known.close in text:
            text = text[text.rindex(known.close) + len(known.close) :]
    return text


def _reasoning(author: Author, tokens: Collection[str], template: str) -> Reasoning | None:
    """What stands around reasoning: as the template writes it, else a pair of marks that is known and there."""
    written = author.written(Sample(_CONTENT, _THOUGHT, ()))
    if written is not None and _THOUGHT in written.text:
        before, _, after = written.text.partition(_THOUGHT)
        close = after.partition(_CONTENT)[0].strip()
        opener = before.strip() or next(iter(written.prompt.split()[-1:]), "")
        known = [pair for pair in KNOWN_REASONING if opener.endswith(pair.open) and close.startswith(pair.close)]
        if known:
            return known[0]
        opened, closed = _atoms(opener), _atoms(close)
        if opened and closed and opened[-1] != closed[0]:
            # A marker and a word that goes with it, as in `<|channel>thought`.
            place = max((n for n, atom in enumerate(opened) if atom[0] in "<["), default=None)
            if place is not None and closed[0][0] in "<[":
                return Reasoning("".join(opened[place:]), closed[0])
    for pair in KNOWN_REASONING:
        if pair.close in template or pair.close in tokens:
            return pair
    return None


def _around_content(author: Author, reasoning: Reasoning | None) -> tuple[str, str]:
    """What a template writes around an answer's text, where that is more than the turn's own marks."""
    written = author.written(Sample(_CONTENT, None, ()))
    if written is None or _CONTENT not in written.text + author.tail:
        return "", ""
    before = written.text.partition(_CONTENT)[0]
    if reasoning is not None and reasoning.close.strip() in before:
        before = before[before.rindex(reasoning.close.strip()) + len(reasoning.close.strip()) :]
    opener = before.strip()
    if not opener or (reasoning is not None and opener.startswith(reasoning.open.strip())):
        return "", ""
    ends = _atoms(author.tail.strip())
    return (opener, ends[0]) if len(ends) > 1 and opener[0] in "<[" else ("", "")


# The proof.


def held_out() -> list[Sample]:
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
    found = [Sample("", None, made) for made in calls]
    found += [Sample("Let me see.", None, made) for made in (calls[0], calls[6])]
    found += [Sample("", "It must be\n\nlooked up.", calls[0]), Sample("Well, 日本.", "Because.", calls[6])]
    return [*found, Sample("Just text.\n\nOf two lines.", None, ()), Sample("So.", "Since\nit is.", ())]


def _trouble(author: Author, grammar: Grammar) -> str:
    """What speaks against a grammar: the first answer that is not read back as it was meant; "" for nothing."""
    proven = 0
    for sample in held_out():
        if len(sample.calls) > (author.quirks.most_calls or len(sample.calls)):
            continue
        if grammar.calls is not None and grammar.calls.bare and sample.calls and sample.content:
            continue  # a bare call is all of an answer
        written = author.written(sample)
        if written is None or not all(call.name in written.text for call in sample.calls):
            continue
        problem = _not_as_meant(author, grammar, sample, written)
        if problem:
            return f"{problem} in {written.text[:300]!r}"
        proven += bool(sample.calls)
    return "" if proven >= 4 else "it refuses to write most calls"


def _not_as_meant(author: Author, grammar: Grammar, sample: Sample, written: Written) -> str:
    reasoning = grammar.reasoning
    thinking = reasoning is not None and written.prompt.rstrip().endswith(reasoning.open.strip())
    text = written.text
    if thinking and reasoning is not None and reasoning.close.strip() not in text:
        thinking = False  # a template that leaves reasoning out of the past
    whole, parsed = _read(grammar, [text], thinking), _read(grammar, list(text), thinking)
    if whole != parsed:
        return "it is read differently as it streams"
    read = whole[1]
    if [(call.name, call.arguments) for call in read.tool_calls] != [(c.name, c.arguments) for c in sample.calls]:
        return f"the calls are read as {[(call.name, call.arguments) for call in read.tool_calls]!r}"
    ids = [author.call_id(call, n) for n, call in enumerate(sample.calls)]
    written_ids = _writes_ids(grammar.calls) and all(each in text for each in ids)
    if written_ids and [call.id for call in read.tool_calls] != ids:
        return "ids are read differently"
    expected = sample.content.strip() if sample.content.strip() in text else ""
    as_thought = not read.content and expected == (read.reasoning or "").strip()
    if read.content.strip() != expected and not as_thought:  # some templates write text beside calls as reasoning
        return f"the content is read as {read.content!r}"
    if sample.reasoning is not None and sample.reasoning in text and (read.reasoning or "").strip() != sample.reasoning:
        return f"the reasoning is read as {read.reasoning!r}"
    return ""


def _writes_ids(form: CallForm | None) -> bool:
    return form is not None and isinstance(form.body, JsonObject | NamedArguments) and bool(form.body.id)


def _read(grammar: Grammar, pieces: Sequence[str], thinking: bool) -> tuple[AnswerDelta, Parsed]:
    """All deltas as one, and the whole."""
    parser = parser_of(grammar, tools=TOOLS, thinking=thinking, new_id=lambda n: f"new{n}")
    deltas = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return summed(deltas), parser.parsed


def summed(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """What deltas add up to, with one delta a call."""
    calls: list[CallDelta] = []
    for delta in (call for each in deltas for call in each.tool_calls):
        if delta.index == len(calls):
            calls.append(delta)
        else:
            last = calls[delta.index]
            calls[delta.index] = CallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
    return AnswerDelta("".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), tuple(calls))


def _atoms(text: str) -> list[str]:
    """A text in pieces that belong together: marks, words, white space."""
    return _ATOM.findall(text)


def _common_atoms(first: Sequence[str], second: Sequence[str]) -> list[str]:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return list(first[:count])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
