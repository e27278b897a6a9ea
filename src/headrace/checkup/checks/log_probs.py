"""Are there log-probs of what was sampled, of which mode, and do they hold when the same ids are asked again?"""

from __future__ import annotations

from headrace.checkup.answer import Answer, Ask
from headrace.checkup.checks.subject import Subject
from headrace.checkup.dialects import DIALECTS
from headrace.checkup.finding import Finding, bad, note, ok
from headrace.checkup.http import Refused
from headrace.checkup.log_prob_rules import TOLERANCE, Trouble, mode, step_trouble, value_troubles

CHECK = "log-probs"
#: How many of the best tokens are asked for: most servers give as many, OpenAI's limit is 20, some give 5.
TOPS = (20, 5, 1)
TEMPERATURE = 0.5
MODES = {
    "raw": "raw: those of temperature 1, whatever is sampled with",
    "processed": "processed: those of the temperature that is sampled with",
}


async def check(on: Subject) -> list[Finding]:
    if not on.dialect.log_probs:
        return []
    name = on.dialect.name
    try:
        answer, tops = await _answer(on)
    except Refused as error:
        return [bad(CHECK, name, "no_log_probs", f"log-probs are refused: {error}")]
    troubles = value_troubles(answer)
    recorded = step_trouble(answer)
    troubles += [recorded] if recorded is not None else []
    if not troubles:
        again = await _replayed(on, answer)
        troubles += [again] if again is not None else []
    if troubles:
        return [bad(CHECK, name, *trouble) for trouble in troubles]
    return [await _mode(on, tops)]


async def _answer(on: Subject) -> tuple[Answer, int]:
    """A greedy answer with as many of the best tokens as the server gives, and how many those are."""
    for tops in TOPS:
        try:
            (answer,) = await on.once(Ask(on.question, tops=tops))
            return answer, tops
        except Refused as error:
            if error.status not in (400, 422) or tops == TOPS[-1]:
                raise
    raise AssertionError("one of the numbers is the last")


async def _replayed(on: Subject, answer: Answer) -> Trouble | None:
    """The ids that are told, given back as a prompt, must be followed by the same token with the same log-prob."""
    prompt, ids, values = answer.prompt_ids, answer.ids, answer.log_probs
    if not on.completions or prompt is None or not ids or not values:
        return None
    at = len(ids) // 2
    other = Subject(on.target, DIALECTS["completions"], on.words)
    try:
        (again,) = await other.once(Ask([{"prompt": prompt + ids[:at]}], max_tokens=1, tops=1))
    except Refused:
        return None  # a server that takes no ids as a prompt
    if not again.log_probs or not again.ids:
        return None
    # Where the best two are as good as equal, either may be chosen.
    if abs(again.log_probs[0] - values[at]) > TOLERANCE:
        said = f"after the ids told, token {at} has {again.log_probs[0]:.3f}, and the answer said {values[at]:.3f}"
        return "replay_differs", said
    return None


async def _mode(on: Subject, tops: int) -> Finding:
    first = Ask(on.question, max_tokens=1, tops=tops, temperature=1.0)
    (one,) = await on.once(first)
    (other,) = await on.once(Ask(on.question, max_tokens=1, tops=tops, temperature=TEMPERATURE))
    name = on.dialect.name
    if not one.tops or not other.tops:
        return note(CHECK, name, "unclear", "the best tokens are not told, so the mode cannot be seen")
    if one.prompt_ids != other.prompt_ids:
        return note(
            CHECK, name, "unclear", "the same question becomes another prompt each time, so the mode cannot be seen"
        )
    found = mode(one.tops[0], other.tops[0], TEMPERATURE)
    if found in MODES:
        return ok(CHECK, name, found, MODES[found])
    if found == "unclear":
        return note(CHECK, name, found, "the best tokens are too alike for their mode to be seen")
    said = f"those of temperature 1 and {TEMPERATURE} are neither raw nor processed: of what, nobody can tell"
    return bad(CHECK, name, found, said)
