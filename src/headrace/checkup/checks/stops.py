"""Is a stop string obeyed: the text ends before it, and the answer says that it stopped?"""

from __future__ import annotations

from dataclasses import replace

from headrace.checkup.answer import Ask
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note, ok
from headrace.checkup.http import Refused

CHECK = "stop"
#: Dialects that have no stop strings.
WITHOUT = ("responses",)


async def check(on: Subject) -> list[Finding]:
    name = on.dialect.name
    if name in WITHOUT:
        return []
    ask = Ask(on.question)
    (plain,) = await on.once(ask)
    stop = chosen(plain.text)
    if stop is None:
        return [note(CHECK, name, "nothing_said", "the model said nothing that could be stopped at")]
    try:
        (stopped,) = await on.once(replace(ask, stop=stop))
    except Refused as error:
        return [note(CHECK, name, "refused", f"stop strings are refused: {error}")]
    if stop in stopped.text:
        return [bad(CHECK, name, "ignored", f"the text goes on past {stop!r}")]
    if stopped.text == plain.text[: plain.text.index(stop)] and stopped.finish != "stop":
        return [bad(CHECK, name, "finish", f"stopped at {stop!r}, and said to have ended by {stopped.finish!r}")]
    return [ok(CHECK, name, "obeyed", f"stops at {stop!r}")]


def chosen(text: str) -> str | None:
    """A character from the middle of a text, which most tokenizers write alone or within a token, and JSON as it is."""
    found = [char for char in text[len(text) // 3 :] if char.isascii() and char.isprintable() and not char.isspace()]
    return found[0] if found else None
