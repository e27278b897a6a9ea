"""How much a completion looks like reasoning in steps."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction

#: The weight of a pattern that `pattern_weights` does not name.
OTHER_WEIGHT = 0.3


@registry.register
class ReasoningStepsReward(RewardFunction):
    """For each kind of mark (numbered steps, lists, bullets, words of transition) its weight, in full from `min_steps`
    marks on; `base_score` for more than `min_words` words; 1 at most.
    """

    PATTERNS: ClassVar[dict[str, str]] = {
        "numbered_steps": r"Step\s+\d+[\s:]+",
        "list_numbers": r"(?:^|\n)\s*\d+\.\s+",
        "bullet_points": r"(?:^|\n)\s*[\-\*•]\s+",
        "transition_words": r"\b(?:First|Second|Third|Fourth|Fifth|Next|Then|Finally|Subsequently|Afterward|Lastly|"
        r"Initially|To begin|Let's begin|I'll first|After that|In conclusion|Eventually|To solve|begin by|"
        r"understand|analyze|apply|compute)\b",
    }
    WEIGHTS: ClassVar[dict[str, float]] = {
        "numbered_steps": 0.5,
        "list_numbers": 0.5,
        "bullet_points": 0.4,
        "transition_words": 0.3,
    }

    def __init__(
        self,
        min_words: int = 10,
        min_steps: int = 3,
        base_score: float = 0.1,
        pattern_weights: dict[str, float] | None = None,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.min_words = min_words
        self.min_steps = min_steps
        self.base_score = base_score
        self.pattern_weights = self.WEIGHTS | (pattern_weights or {})
        self.patterns = dict(self.PATTERNS)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, content: str) -> float:
        score = 0.0
        for kind, pattern in self.patterns.items():
            marks = len(re.findall(pattern, content, re.IGNORECASE | re.MULTILINE))
            score += min(1.0, marks / self.min_steps) * self.pattern_weights.get(kind, OTHER_WEIGHT)
        if len(content.split()) > self.min_words:
            score += self.base_score
        return min(1.0, score)


def reasoning_steps_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """`ReasoningStepsReward` with its defaults."""
    return ReasoningStepsReward().compute(completions, **kwargs)
