"""A tool's round trip: the model calls, the result goes back, and the next prompt holds the call as it was sampled."""

from __future__ import annotations

from headrace.checkup.answer import PARAMETERS, TOOL, Ask, Call
from headrace.checkup.checks.drift import drifted
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note
from headrace.checkup.http import Refused

CHECK = "tools"
QUESTION = "What is 2 + 3?"
RESULT = "5"
#: Room for a call with a few words before it.
MAX_TOKENS = 96


async def check(on: Subject) -> list[Finding]:
    if not on.dialect.turns:
        return []
    name, asked = on.dialect.name, on.dialect.question(QUESTION)
    conversation = await on.target.begin(on.dialect)
    try:
        (answer,) = await conversation.ask(Ask(asked, max_tokens=MAX_TOKENS, tool=True))
    except Refused as error:
        return [note(CHECK, name, "refused", f"tools are refused: {error}")]
    if not answer.calls:
        await conversation.end()
        return [note(CHECK, name, "no_call", "the model called no tool; nothing was sent back")]
    wrong = [said for call in answer.calls if (said := _wrong(call)) is not None]
    if wrong:
        await conversation.end()
        return [bad(CHECK, name, "bad_call", said) for said in wrong]
    results = [item for call in answer.calls for item in on.dialect.result(call, RESULT)]
    try:
        await conversation.ask(Ask([*asked, *answer.items, *results], max_tokens=MAX_TOKENS, tool=True))
    except Refused as error:
        return [bad(CHECK, name, "result_refused", f"a call's result is refused: {error}")]
    return await drifted(on, await conversation.end(), CHECK)


def _wrong(call: Call) -> str | None:
    """Why a call is none that a client could carry out. What the model made of the arguments is its own affair."""
    if not call.id:
        return f"the call of {call.name!r} has no id"
    if call.name != TOOL:
        return f"{call.name!r} was called, and {TOOL!r} offered"
    if not isinstance(call.arguments, dict):
        return f"the arguments are {call.arguments!r:.80}, no JSON object with {', '.join(PARAMETERS['properties'])}"
    return None
