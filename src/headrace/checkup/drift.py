"""Why a prompt does not begin with the turn before it: by ids, and by text where somebody can tell what ids say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.checkup.answer import Answer

CAUSES = {
    "retokenized": "the answer's text is the same, its ids are not: it was encoded again",
    "reasoning_stripped": "the answer's reasoning is not in the next prompt",
    "tool_calls_rendered": "the answer's tool calls are written differently than they were sampled",
    "whitespace": "white space of the conversation was changed",
    "template_rewrites": "what came before the answer is written differently than when it was sampled from",
    "answer_rewritten": "the answer is not in the next prompt as it was sampled",
}

#: How many ids the mark before reasoning may have, which a template may keep.
MARK = 3


@dataclass(frozen=True, slots=True)
class Texts:
    """What ids say: the prompt and the response of a turn, and the next turn's prompt."""

    prompt: str
    response: str
    following: str


def agreed(before: Sequence[int], after: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    for at, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return at
    return min(len(before), len(after))


def cause_of(before: Answer, following: Sequence[int], texts: Texts | None) -> str | None:
    """The cause of drift between an answer and the next prompt, a key of `CAUSES`; None where there is none."""
    whole, prompt = before.whole, before.prompt_ids
    assert whole is not None
    assert prompt is not None
    same = agreed(whole, following)
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


def _stripped(reasoning: str, same: int, texts: Texts | None) -> bool:
    """Whether an answer's reasoning is gone; `same`: how many of its ids are still there."""
    if texts is None:
        return same <= MARK
    return reasoning.strip() not in texts.following[len(texts.prompt) :]


def _bare(text: str) -> str:
    return "".join(text.split())
