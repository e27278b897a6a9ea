"""Does a stream say what a whole answer says: words, calls, ids, usage, and events in order?"""

from __future__ import annotations

from dataclasses import replace

from headrace.checkup.answer import Answer, Ask, Malformed
from headrace.checkup.checks.ids import troubles
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note, ok
from headrace.checkup.http import Refused

CHECK = "streaming"
#: What `Answer.said` holds, by name.
PARTS = ("text", "reasoning", "calls", "finish")


async def check(on: Subject) -> list[Finding]:
    name, ask = on.dialect.name, Ask(on.question)
    (first,), (second,) = await on.once(ask), await on.once(ask)
    try:
        answers, stream = await on.streamed(replace(ask, stream=True))
        (streamed,) = answers
    except Refused as error:
        return [note(CHECK, name, "refused", f"streams are refused: {error}")]
    except (Malformed, ValueError) as error:
        return [bad(CHECK, name, "malformed", str(error))]
    found = [bad(CHECK, name, cause, said) for cause, said in stream.troubles]
    if streamed.whole is not None:
        found += [bad(CHECK, name, cause, said) for cause, said in troubles(streamed)]
    if not _same(first, second):
        return found or [
            note(CHECK, name, "not_repeatable", "whole answers at temperature 0 differ; none to compare to")
        ]
    found += [bad(CHECK, name, *each) for each in _differences(first, streamed)]
    if found:
        return found
    if streamed.sampled is None:
        return [note(CHECK, name, "no_usage", "the stream says what a whole answer says, but not its usage")]
    return [ok(CHECK, name, "same", "a stream says what a whole answer says")]


def _same(one: Answer, other: Answer) -> bool:
    return one.said() == other.said() and one.whole == other.whole


def _differences(whole: Answer, streamed: Answer) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, said, wanted in zip(PARTS, streamed.said(), whole.said(), strict=True):
        if said != wanted:
            found.append((f"{name}_differs", f"{name} is {said!r:.60} in the stream, {wanted!r:.60} in a whole answer"))
    if streamed.ids != whole.ids or streamed.prompt_ids != whole.prompt_ids:
        found.append(("ids_differ", "the stream tells other ids than a whole answer, or none"))
    for what, one, other in (
        ("prompt", whole.consumed, streamed.consumed),
        ("response", whole.sampled, streamed.sampled),
    ):
        if other is not None and one != other:
            found.append(("usage_differs", f"usage of the {what} is {other} in the stream, {one} in a whole answer"))
    return found
