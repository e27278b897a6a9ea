"""Does n sample n answers, each with ids of its own?"""

from __future__ import annotations

from headrace.checkup.answer import Ask
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding, bad, note, ok
from headrace.checkup.http import Refused

CHECK = "n"
N = 2
#: Two samples that are the same, and this unlikely, were sampled once.
UNLIKELY = -20.0


async def check(on: Subject) -> list[Finding]:
    if not on.dialect.several:
        return []
    name = on.dialect.name
    try:
        answers = await on.once(Ask(on.question, n=N, temperature=1.0, tops=0))
    except Refused as error:
        return [note(CHECK, name, "refused", f"n is refused: {error}")]
    if len(answers) != N:
        return [bad(CHECK, name, "ignored", f"n is {N}, and {len(answers)} came back")]
    first, second = answers
    if first.said() == second.said() and first.log_probs and sum(first.log_probs) < UNLIKELY:
        return [bad(CHECK, name, "copied", "both answers are the same one, which chance does not explain")]
    if (first.ids is None) != (second.ids is None) or first.prompt_ids != second.prompt_ids:
        return [bad(CHECK, name, "ids_missing", "one of the answers lacks its ids, or has another prompt's")]
    return [ok(CHECK, name, "sampled", f"{N} answers of their own")]
