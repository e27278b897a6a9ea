"""A penalty for completions that repeat themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction

#: Words of a sentence above which saying it twice counts as repeating it.
SENTENCE_WORDS = 3
#: What repeated sentences cost beyond the base penalty, where all of them are.
SENTENCES_COST = 0.4
PHRASES = (3, 4, 5)
#: Words of a text whose phrases are looked at.
PHRASED_WORDS = 5
LEAST_PENALTY = -0.1
#: Words whose repetition does not count.
COMMON = (
    "this that with from what when where which who whom whose will shall should would could have has had been being "
    "than then there these those their"
)


@registry.register
class RepetitionPenaltyReward(RewardFunction):
    """0 for a text without repetition, down to -1. Short texts cost `short_text_penalty`; a sentence said twice costs
    `paragraph_repetition_base_penalty` and more; else words, phrases, stutters and beginnings of sentences that
    repeat are rates, weighed by `component_weights`, of which what is above `threshold` counts.
    """

    WEIGHTS: ClassVar[dict[str, float]] = {
        "word_repetition": 0.3,
        "phrase_repetition": 0.4,
        "consecutive_repetition": 0.6,
        "beginning_repetition": 0.5,
    }

    def __init__(
        self,
        threshold: float = 0.05,
        min_words: int = 10,
        min_sentences: int = 2,
        short_text_penalty: float = -0.1,
        paragraph_repetition_base_penalty: float = -0.6,
        component_weights: dict[str, float] | None = None,
        stopwords: set[str] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.threshold = threshold
        self.min_words = min_words
        self.min_sentences = min_sentences
        self.short_text_penalty = short_text_penalty
        self.paragraph_repetition_base_penalty = paragraph_repetition_base_penalty
        self.component_weights = self.WEIGHTS | (component_weights or {})
        self.stopwords = stopwords or set(COMMON.split())

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self._penalty(self.get_content(completion)) for completion in completions]

    def _penalty(self, content: str) -> float:
        words = re.findall(r"\b\w+\b", content.lower())
        sentences = [part.strip() for part in re.split(r"[.!?]", content) if part.strip()]
        if len(words) < self.min_words or len(sentences) < self.min_sentences:
            return self.short_text_penalty
        again = _again(sentence for sentence in sentences if len(sentence.split()) > SENTENCE_WORDS)
        if again:
            return self.paragraph_repetition_base_penalty - min(1.0, again / len(sentences)) * SENTENCES_COST
        over = self._score(words, sentences) - self.threshold
        return 0.0 if over <= 0 else min(-min(1.0, over / (1 - self.threshold)), LEAST_PENALTY)

    def _score(self, words: Sequence[str], sentences: Sequence[str]) -> float:
        said = Counter(word for word in words if len(word) > 3 and word not in self.stopwords)
        stutters = sum(word == before and len(word) > 2 for before, word in pairwise(words))
        openings = [parts[:3] for sentence in sentences if len(parts := sentence.split()) >= 3]
        sizes = PHRASES if len(words) >= PHRASED_WORDS else ()
        rates = {
            "word_repetition": sum(count - 1 for count in said.values() if count > 2) / len(words),
            "phrase_repetition": sum(_again(_phrases(words, size)) * (size / 3) for size in sizes) / len(words),
            "consecutive_repetition": stutters / len(words),
            "beginning_repetition": _again(map(tuple, openings)) / len(sentences),
        }
        return sum(rate * self.component_weights[kind] for kind, rate in rates.items())


def _again(things: Iterable[Any]) -> int:
    """How many items occurred earlier in the sequence."""
    counts = Counter(things)
    return counts.total() - len(counts)


def _phrases(words: Sequence[str], size: int) -> Iterable[tuple[str, ...]]:
    return zip(*(words[at:] for at in range(size)), strict=False)


def repetition_penalty_reward(completions: list[Any], threshold: float = 0.05, **kwargs: Any) -> list[float]:
    """`RepetitionPenaltyReward` with its defaults but for `threshold`."""
    return RepetitionPenaltyReward(threshold=threshold).compute(completions, **kwargs)
