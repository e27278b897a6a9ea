"""Checks that there are log-probs of what was sampled, which mode they are, and that they are the same when the ids are
asked for again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.checkup.answer import CheckAnswer, CheckRequest
from headrace.checkup.dialects import DIALECTS
from headrace.checkup.report import Finding, bad, note, ok
from headrace.checkup.target import CallRefused, Subject
from headrace.tokens.check import log_prob_mode

#: How far two computations of one log-prob may be apart: batches and low precision move them a little.
LOG_PROB_TOLERANCE = 0.1
#: The most that a token's probabilities may add up to: 1, and some rounding.
MAX_PROBABILITY_MASS = 1.01
#: How far apart two tokens' log-probs must be for a change of temperature to show.
MIN_LOG_PROB_SPREAD = 0.1

Trouble = tuple[str, str]


def value_troubles(answer: CheckAnswer) -> list[Trouble]:
    """Faults in the log-probs of one answer at temperature 0 that has the top tokens."""
    values, ids = answer.log_probs, answer.ids
    if not values:
        return [("no_log_probs", "answers have no log-probs: what sampled them cannot be known")]
    found: list[Trouble] = []
    if ids is not None and len(values) != len(ids):
        found.append(("count", f"{len(values)} log-probs for {len(ids)} ids"))
    wrong = next((value for value in values if not math.isfinite(value) or value > 1e-6), 0.0)
    if wrong != 0.0:
        return [*found, ("value", f"{wrong} is no log-prob")]
    for at, (token, value, top) in enumerate(zip(answer.tokens, values, answer.tops, strict=False)):
        same = [told for text, told in top if text == token]
        if same and min(abs(told - value) for told in same) > LOG_PROB_TOLERANCE:
            return [*found, ("tops_differ", f"token {at} has {value:.3f}, and {same[0]:.3f} among the best")]
        if top and value < max(told for _, told in top) - LOG_PROB_TOLERANCE:
            return [*found, ("not_greedy", f"at temperature 0 token {at} has {value:.3f}, less than another's")]
        if sum(math.exp(told) for _, told in top) > MAX_PROBABILITY_MASS:
            return [*found, ("mass", f"the best of token {at} have more than all of the probability")]
    return found


def step_trouble(answer: CheckAnswer) -> Trouble | None:
    """How the recorded log-probs differ from those in the answer; None where they do not."""
    recorded = answer.step.log_probs if answer.step is not None else None
    if answer.step is None or answer.log_probs is None:
        return None
    if recorded is None or len(recorded) != len(answer.log_probs):
        return "unrecorded", "the step does not hold one log-prob a token"
    if max((abs(a - b) for a, b in zip(recorded, answer.log_probs, strict=True)), default=0.0) > 1e-5:
        return "recorded_differ", "the recorded log-probs are not those that the answer told"
    return None


def observed_mode(
    at_one: Sequence[tuple[str, float]], at_other: Sequence[tuple[str, float]], temperature: float
) -> str:
    """`raw`, `processed`, `neither`, or `unclear` where the two positions do not decide it."""
    one, other = _by_text(at_one), _by_text(at_other)
    shared = sorted(one.keys() & other.keys())
    values = [one[token] for token in shared]
    if len(shared) < 2 or max(values) - min(values) < MIN_LOG_PROB_SPREAD:
        return "unclear"
    numbered = [{at: told[token] for at, token in enumerate(shared)} for told in (one, other)]
    found = log_prob_mode(numbered[0], numbered[1], temperature)
    return "neither" if found == "unknown" else found


def _by_text(tops: Sequence[tuple[str, float]]) -> Mapping[str, float]:
    """Log-probs by text, without texts that several tokens share (as parts of characters do)."""
    texts = [text for text, _ in tops]
    return {text: value for text, value in tops if text and "\ufffd" not in text and texts.count(text) == 1}


LOG_PROBS = "log-probs"
#: How many of the best tokens are asked for: most servers give as many, OpenAI's limit is 20, some give 5.
TOP_LOGPROBS_TRIED = (20, 5, 1)
OTHER_TEMPERATURE = 0.5
MODES = {
    "raw": "raw: those of temperature 1, whatever is sampled with",
    "processed": "processed: those of the temperature that is sampled with",
}


async def check_log_probs(on: Subject) -> list[Finding]:
    """Checks that there are log-probs, that they are the same when asked for again, and which mode they are."""
    if not on.dialect.log_probs:
        return []
    name = on.dialect.name
    try:
        answer, tops = await _greedy_answer(on)
    except CallRefused as error:
        return [bad(LOG_PROBS, name, "no_log_probs", f"log-probs are refused: {error}")]
    troubles = value_troubles(answer)
    recorded = step_trouble(answer)
    troubles += [recorded] if recorded is not None else []
    if not troubles:
        again = await _replay_trouble(on, answer)
        troubles += [again] if again is not None else []
    if troubles:
        return [bad(LOG_PROBS, name, *trouble) for trouble in troubles]
    return [await _mode(on, tops)]


async def _greedy_answer(on: Subject) -> tuple[CheckAnswer, int]:
    """A greedy answer with as many top tokens as the server gives, and how many those are."""
    for tops in TOP_LOGPROBS_TRIED:
        try:
            (answer,) = await on.once(CheckRequest(on.question, tops=tops))
            return answer, tops
        except CallRefused as error:
            if error.status not in (400, 422) or tops == TOP_LOGPROBS_TRIED[-1]:
                raise
    raise AssertionError("one of the numbers is the last")


async def _replay_trouble(on: Subject, answer: CheckAnswer) -> Trouble | None:
    """The fault where the answer's ids, sent as a prompt, are not followed by the same token with the same log-prob."""
    prompt, ids, values = answer.prompt_ids, answer.ids, answer.log_probs
    if not on.completions or prompt is None or not ids or not values:
        return None
    at = len(ids) // 2
    other = Subject(on.target, DIALECTS["completions"], on.reader)
    try:
        (again,) = await other.once(CheckRequest([{"prompt": prompt + ids[:at]}], max_tokens=1, tops=1))
    except CallRefused:
        return None  # a server that takes no ids as a prompt
    if not again.log_probs or not again.ids:
        return None
    # Where the best two are as good as equal, either may be chosen.
    if abs(again.log_probs[0] - values[at]) > LOG_PROB_TOLERANCE:
        said = f"after the ids told, token {at} has {again.log_probs[0]:.3f}, and the answer said {values[at]:.3f}"
        return "replay_differs", said
    return None


async def _mode(on: Subject, tops: int) -> Finding:
    first = CheckRequest(on.question, max_tokens=1, tops=tops, temperature=1.0)
    (one,) = await on.once(first)
    (other,) = await on.once(CheckRequest(on.question, max_tokens=1, tops=tops, temperature=OTHER_TEMPERATURE))
    name = on.dialect.name
    if not one.tops or not other.tops:
        return note(LOG_PROBS, name, "unclear", "the best tokens are not told, so the mode cannot be seen")
    if one.prompt_ids != other.prompt_ids:
        return note(
            LOG_PROBS, name, "unclear", "the same question becomes another prompt each time, so the mode cannot be seen"
        )
    found = observed_mode(one.tops[0], other.tops[0], OTHER_TEMPERATURE)
    if found in MODES:
        return ok(LOG_PROBS, name, found, MODES[found])
    if found == "unclear":
        return note(LOG_PROBS, name, found, "the best tokens are too alike for their mode to be seen")
    said = f"those of temperature 1 and {OTHER_TEMPERATURE} are neither raw nor processed: of what, nobody can tell"
    return bad(LOG_PROBS, name, found, said)
