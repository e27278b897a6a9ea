"""Does each turn's prompt begin, id for id, with the prompt and the response of the turn before?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headrace.checkup.answer import Answer, Ask
from headrace.checkup.checks.subject import QUESTION, Subject
from headrace.checkup.drift import CAUSES, Texts, cause_of
from headrace.checkup.finding import Finding, bad, note, ok

CHECK = "drift"
QUESTIONS = (QUESTION, "And  then?\n\nGo on.", "How does it end?")


async def check(on: Subject) -> list[Finding]:
    if not on.dialect.turns:
        return []
    conversation = await on.target.begin(on.dialect)
    history = []
    for seed, question in enumerate(QUESTIONS):
        history += on.dialect.question(question)
        # Warm, so that ids are sampled that no encoder would choose.
        (answer,) = await conversation.ask(Ask(list(history), temperature=1.0, seed=seed))
        history += answer.items
    return await drifted(on, await conversation.end(), CHECK)


async def drifted(on: Subject, answers: Sequence[Answer], check: str) -> list[Finding]:
    """What is to be said of a conversation whose every turn goes on from the one before."""
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
    return [bad(check, name, cause, f"turn {at}: {CAUSES[cause]}") for cause, at in found.items()]


async def _cause(on: Subject, before: Answer, after: Answer) -> str | None:
    prompt, ids, following = before.prompt_ids, before.ids, after.prompt_ids
    assert prompt is not None
    assert ids is not None
    assert following is not None
    if cause_of(before, following, None) is None:
        return None
    said = [await on.words.read(part) for part in (prompt, ids, following)]
    texts = Texts(*(text for text in said if text is not None)) if None not in said else None
    return cause_of(before, following, texts)


def _by_counts(on: Subject, answers: Sequence[Answer], check: str) -> Finding:
    """Without ids, counts still tell of a prompt that is too short to hold the turn before."""
    name = on.dialect.name
    for at, (before, after) in enumerate(pairwise(answers), start=2):
        if None not in (before.consumed, before.sampled, after.consumed):
            least = (before.consumed or 0) + (before.sampled or 0)
            if (after.consumed or 0) < least:
                said = f"turn {at}: a prompt of {after.consumed} tokens cannot hold the {least} of the turn before"
                return bad(check, name, "shortened", said)
    return note(check, name, "unseen", "without ids nobody can tell")
