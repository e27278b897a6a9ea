"""What must hold of an answer's log-probs, whoever computed them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.checkup.answer import Answer
from headrace.tokens.check import log_prob_mode

#: How far two computations of the same log-prob may be apart: batches and low precision move them a little.
TOLERANCE = 0.1
#: Rounding alone takes a sum of probabilities so far past 1.
MASS = 1.01
#: Two tokens' log-probs must be this far apart for temperatures to tell anything.
SPREAD = 0.1

Trouble = tuple[str, str]


def value_troubles(answer: Answer) -> list[Trouble]:
    """Of one answer at temperature 0, with the best few of each token."""
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
        if same and min(abs(told - value) for told in same) > TOLERANCE:
            return [*found, ("tops_differ", f"token {at} has {value:.3f}, and {same[0]:.3f} among the best")]
        if top and value < max(told for _, told in top) - TOLERANCE:
            return [*found, ("not_greedy", f"at temperature 0 token {at} has {value:.3f}, less than another's")]
        if sum(math.exp(told) for _, told in top) > MASS:
            return [*found, ("mass", f"the best of token {at} have more than all of the probability")]
    return found


def step_trouble(answer: Answer) -> Trouble | None:
    """What was recorded must be what was told."""
    recorded = answer.step.log_probs if answer.step is not None else None
    if answer.step is None or answer.log_probs is None:
        return None
    if recorded is None or len(recorded) != len(answer.log_probs):
        return "unrecorded", "the step does not hold one log-prob a token"
    if max((abs(a - b) for a, b in zip(recorded, answer.log_probs, strict=True)), default=0.0) > 1e-5:
        return "recorded_differ", "the recorded log-probs are not those that the answer told"
    return None


def mode(at_one: Sequence[tuple[str, float]], at_other: Sequence[tuple[str, float]], temperature: float) -> str:
    """`raw`, `processed`, `neither`, or `unclear` where the two positions tell too little."""
    one, other = _named(at_one), _named(at_other)
    shared = sorted(one.keys() & other.keys())
    values = [one[token] for token in shared]
    if len(shared) < 2 or max(values) - min(values) < SPREAD:
        return "unclear"
    numbered = [{at: told[token] for at, token in enumerate(shared)} for told in (one, other)]
    found = log_prob_mode(numbered[0], numbered[1], temperature)
    return "neither" if found == "unknown" else found


def _named(tops: Sequence[tuple[str, float]]) -> Mapping[str, float]:
    """By text. Several tokens that read alike are none of them; parts of characters read alike too."""
    texts = [text for text, _ in tops]
    return {text: value for text, value in tops if text and "\ufffd" not in text and texts.count(text) == 1}
