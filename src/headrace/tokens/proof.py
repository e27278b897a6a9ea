"""The proof of a grammar: answers that a template writes are read back as they were meant, at once and streamed."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tokens.answer import AnswerDelta, CallDelta, Parsed
from headrace.tokens.channels import parser_of
from headrace.tokens.forms import CallForm, Grammar, JsonObject, NamedArguments
from headrace.tokens.samples import TOOLS, Author, SampleAnswer, Written, held_out


def trouble(author: Author, grammar: Grammar) -> str:
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


def _not_as_meant(author: Author, grammar: Grammar, sample: SampleAnswer, written: Written) -> str:
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
