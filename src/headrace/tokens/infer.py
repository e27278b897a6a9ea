"""A chat template's form of reasoning and tool calls, learned from what it writes.

The template writes answers whose calls are known; where their names, keys and values stand tells how a call is written,
and what stands between two calls tells what is around each and what around all. A form is taken only if answers that
played no part in finding it, written by the template, are read back as they were meant, at once and character by
character. What cannot be learned that way may be declared (`declared`), and is then tried by the same round trips.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

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
from headrace.tokens.proof import trouble
from headrace.tokens.samples import (
    CONTENT,
    THOUGHT,
    Author,
    Quirks,
    SampleAnswer,
    Write,
    atoms,
    common_atoms,
    json_text,
)
from headrace.tokens.values import reader_of

#: A token that some models write before a bare call.
LEAD = "<|python_tag|>"
_UNWRITTEN = "its chat template writes no tool calls"
_TWO_STRINGS = {"key_one": "first_value", "key_two": "second_value"}


class Inference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learned of a template. `found` says how: "inferred", or the name of a declaration."""

    grammar: Grammar
    quirks: Quirks = Quirks()
    found: str = ""


def infer(write: Write, tokens: Collection[str], template: str) -> Inference:
    """How a template writes answers. `tokens` are the vocabulary's added tokens."""
    author = Author(write, tokens, template)
    reasoning = _reasoning(author, tokens, template)
    content_open, content_close = _around_content(author, reasoning)
    base = Grammar(reasoning, None, "", content_open, content_close)
    writes = _find_quirks(author)
    for declared in DECLARED:
        if declared.first and declared.fits(tokens, template) and not trouble(author, declared.grammar):
            return Inference(declared.grammar, author.quirks, declared.name)
    troubles = []
    if writes:
        for form in _forms(author):
            grammar = msgspec.structs.replace(base, calls=form)
            problem = trouble(author, grammar)
            if not problem:
                return Inference(grammar, author.quirks, "inferred")
            troubles.append(problem)
    for declared in DECLARED:
        if not declared.fits(tokens, template) or declared.first:
            continue
        grammar = _with_declared(base, declared)
        if not writes or not trouble(author, grammar):
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
    one = SampleAnswer("", None, (ToolCall("fetch_alpha", _TWO_STRINGS),))
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
        written = author.written(SampleAnswer("", None, calls[:most]))
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
    given = [key for key, item in value.items() if item in (call.arguments, json_text(call.arguments))]
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
    one = author.written(SampleAnswer("", None, (first,)))
    two = author.written(SampleAnswer("", None, (first, second))) if author.quirks.most_calls != 1 else None
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
    opened = common_atoms(atoms(before)[::-1], atoms(middle)[::-1])[::-1]
    rest = atoms(middle)[: len(atoms(middle)) - len(opened)]
    closed = common_atoms(rest, atoms(after))
    begin, end = atoms(before)[: len(atoms(before)) - len(opened)], atoms(after)[len(closed) :]
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
    parting = atoms(text[first_value_end:next_key])
    opened = common_atoms(atoms(head)[::-1], parting[::-1])[::-1]
    none = author.written(SampleAnswer("", None, (ToolCall(call.name, {}),)))
    if none is not None and call.name in none.text:  # what a call without arguments has after its name, ends the name
        bare_head = atoms(none.text[none.text.find(call.name) + len(call.name) :])
        after_name = common_atoms(atoms(head), bare_head)
        opened = opened if len(opened) + len(after_name) <= len(atoms(head)) else atoms(head)[len(after_name) :]
    after = "".join(atoms(head)[: len(atoms(head)) - len(opened)])
    closed = parting[: len(parting) - len(opened)]
    closed = common_atoms(closed, atoms(text[last_end:]))
    close = "".join(closed).rstrip()
    between = "".join(parting[len(closed) : len(parting) - len(opened)])
    if not "".join(opened).strip() or not middle.strip() or not close.strip():
        return None
    body = Parameters(after, "".join(opened).lstrip(), middle, close, between, _json_middle(author, call, middle))
    return Found(body, at, last_end + len(close))


def _json_middle(author: Author, call: ToolCall, middle: str) -> str:
    """What stands between a key and a value that is no string, where it differs."""
    written = author.written(SampleAnswer("", None, (ToolCall(call.name, {"count": 170017}),)))
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
    written = author.written(SampleAnswer(CONTENT, THOUGHT, ()))
    if written is not None and THOUGHT in written.text:
        before, _, after = written.text.partition(THOUGHT)
        close = after.partition(CONTENT)[0].strip()
        opener = before.strip() or next(iter(written.prompt.split()[-1:]), "")
        known = [pair for pair in KNOWN_REASONING if opener.endswith(pair.open) and close.startswith(pair.close)]
        if known:
            return known[0]
        opened, closed = atoms(opener), atoms(close)
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
    written = author.written(SampleAnswer(CONTENT, None, ()))
    if written is None or CONTENT not in written.text + author.tail:
        return "", ""
    before = written.text.partition(CONTENT)[0]
    if reasoning is not None and reasoning.close.strip() in before:
        before = before[before.rindex(reasoning.close.strip()) + len(reasoning.close.strip()) :]
    opener = before.strip()
    if not opener or (reasoning is not None and opener.startswith(reasoning.open.strip())):
        return "", ""
    ends = atoms(author.tail.strip())
    return (opener, ends[0]) if len(ends) > 1 and opener[0] in "<[" else ("", "")
