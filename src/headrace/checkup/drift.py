"""Checks that each turn's prompt begins, id for id, with the prompt and the response of the turn before, tool calls
included.

Where it does not, the cause is found by ids, and by text where a tokenizer or the server can decode them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.checkup.answer import TOOL_NAME, TOOL_PARAMETERS, AnswerToolCall, CheckAnswer, CheckRequest
from headrace.checkup.report import Finding, bad, note, ok
from headrace.checkup.target import QUESTION, CallRefused, Subject

DRIFT_CAUSES = {
    "retokenized": "the answer's text is the same, its ids are not: it was encoded again",
    "reasoning_stripped": "the answer's reasoning is not in the next prompt",
    "tool_calls_rendered": "the answer's tool calls are written differently than they were sampled",
    "whitespace": "white space of the conversation was changed",
    "template_rewrites": "what came before the answer is written differently than when it was sampled from",
    "answer_rewritten": "the answer is not in the next prompt as it was sampled",
}

#: Ids that the mark before reasoning may have; a template may keep it though it strips the reasoning.
REASONING_MARK_TOKENS = 3


@dataclass(frozen=True, slots=True)
class TurnTexts:
    """The texts of a turn's prompt and response, and of the next turn's prompt."""

    prompt: str
    response: str
    following: str


def common_prefix(before: Sequence[int], after: Sequence[int]) -> int:
    """How many ids two sequences have in common at their beginning."""
    for at, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return at
    return min(len(before), len(after))


def cause_of(before: CheckAnswer, following: Sequence[int], texts: TurnTexts | None) -> str | None:
    """The cause of drift between an answer and the next prompt, a key of `DRIFT_CAUSES`; None where there is none."""
    whole, prompt = before.whole, before.prompt_ids
    assert whole is not None
    assert prompt is not None
    same = common_prefix(whole, following)
    if same == len(whole):
        return None
    if texts is not None:
        told = texts.prompt + texts.response
        if texts.following.startswith(told):
            return "retokenized"
        if not (before.calls and same >= len(prompt)) and _bare(texts.following).startswith(_bare(told)):
            return "whitespace"
    if same < len(prompt):
        return "template_rewrites"
    if before.reasoning and _stripped(before.reasoning, same - len(prompt), texts):
        return "reasoning_stripped"
    return "tool_calls_rendered" if before.calls else "answer_rewritten"


def _stripped(reasoning: str, same: int, texts: TurnTexts | None) -> bool:
    """Whether an answer's reasoning was removed; `same` is how many of its ids are still there."""
    if texts is None:
        return same <= REASONING_MARK_TOKENS
    return reasoning.strip() not in texts.following[len(texts.prompt) :]


def _bare(text: str) -> str:
    return "".join(text.split())


DRIFT = "drift"
QUESTIONS = (QUESTION, "And  then?\n\nGo on.", "How does it end?")


async def check_drift(on: Subject) -> list[Finding]:
    """Checks a conversation of plain turns: each prompt begins with the turn before."""
    if not on.dialect.turns:
        return []
    conversation = await on.target.begin(on.dialect)
    history = []
    for seed, question in enumerate(QUESTIONS):
        history += on.dialect.question(question)
        # Warm, so that ids are sampled that no encoder would choose.
        (answer,) = await conversation.ask(CheckRequest(list(history), temperature=1.0, seed=seed))
        history += answer.items
    return await drifted(on, await conversation.end(), DRIFT)


async def drifted(on: Subject, answers: Sequence[CheckAnswer], check: str) -> list[Finding]:
    """Findings about a conversation in which every turn continues the one before."""
    name, turns = on.dialect.name, len(answers)
    if any(answer.whole is None for answer in answers):
        return [_by_counts(on, answers, check)]
    found: dict[str, int] = {}
    for at, (before, after) in enumerate(pairwise(answers), start=2):
        cause = await _cause(on, before, after)
        if cause is not None:
            found.setdefault(cause, at)
    if not found:
        return [ok(check, name, "prefix", f"each of {turns} prompts begins with the turn before it, id for id")]
    return [bad(check, name, cause, f"turn {at}: {DRIFT_CAUSES[cause]}") for cause, at in found.items()]


async def _cause(on: Subject, before: CheckAnswer, after: CheckAnswer) -> str | None:
    prompt, ids, following = before.prompt_ids, before.ids, after.prompt_ids
    assert prompt is not None
    assert ids is not None
    assert following is not None
    if cause_of(before, following, None) is None:
        return None
    said = [await on.reader.read(part) for part in (prompt, ids, following)]
    texts = TurnTexts(*(text for text in said if text is not None)) if None not in said else None
    return cause_of(before, following, texts)


def _by_counts(on: Subject, answers: Sequence[CheckAnswer], check: str) -> Finding:
    """Findings by token counts, where there are no ids: a prompt that is too short to hold the turn before."""
    name = on.dialect.name
    for at, (before, after) in enumerate(pairwise(answers), start=2):
        if None not in (before.consumed, before.sampled, after.consumed):
            least = (before.consumed or 0) + (before.sampled or 0)
            if (after.consumed or 0) < least:
                said = f"turn {at}: a prompt of {after.consumed} tokens cannot hold the {least} of the turn before"
                return bad(check, name, "shortened", said)
    return note(check, name, "unseen", "without ids nobody can tell")


TOOLS = "tools"
TOOL_QUESTION = "What is 2 + 3?"
TOOL_RESULT = "5"
#: Room for a call with a few words before it.
TOOL_MAX_TOKENS = 96


async def check_tools(on: Subject) -> list[Finding]:
    """Checks a tool's round trip: the model calls, the result is sent, and the next prompt holds the call as it was
    sampled."""
    if not on.dialect.turns:
        return []
    name, asked = on.dialect.name, on.dialect.question(TOOL_QUESTION)
    if on.target.warnings:
        return [note(TOOLS, name, "calls_unread", said) for said in on.target.warnings]
    conversation = await on.target.begin(on.dialect)
    try:
        (answer,) = await conversation.ask(CheckRequest(asked, max_tokens=TOOL_MAX_TOKENS, tool=True))
    except CallRefused as error:
        return [note(TOOLS, name, "refused", f"tools are refused: {error}")]
    if not answer.calls:
        await conversation.end()
        return [note(TOOLS, name, "no_call", "the model called no tool; nothing was sent back")]
    if answer.finish == "length" and not isinstance(answer.calls[-1].arguments, dict):
        await conversation.end()
        return [note(TOOLS, name, "cut_call", f"the call was cut at {TOOL_MAX_TOKENS} tokens; nothing was sent back")]
    wrong = [said for call in answer.calls if (said := _call_trouble(call)) is not None]
    if wrong:
        await conversation.end()
        return [bad(TOOLS, name, "bad_call", said) for said in wrong]
    results = [item for call in answer.calls for item in on.dialect.result(call, TOOL_RESULT)]
    try:
        await conversation.ask(CheckRequest([*asked, *answer.items, *results], max_tokens=TOOL_MAX_TOKENS, tool=True))
    except CallRefused as error:
        return [bad(TOOLS, name, "result_refused", f"a call's result is refused: {error}")]
    return await drifted(on, await conversation.end(), TOOLS)


def _call_trouble(call: AnswerToolCall) -> str | None:
    """Why a client could not execute a tool call; None where it could. The values of its arguments do not matter."""
    if not call.id:
        return f"the call of {call.name!r} has no id"
    if call.name != TOOL_NAME:
        return f"{call.name!r} was called, and {TOOL_NAME!r} offered"
    if not isinstance(call.arguments, dict):
        return (
            f"the arguments are {call.arguments!r:.80}, no JSON object with {', '.join(TOOL_PARAMETERS['properties'])}"
        )
    return None
