"""Whether a completion's final answer is right, compared as mathematics."""

from __future__ import annotations

from typing import Any

from headrace.rewards.answers import behind_thought, is_right
from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction, log, one_each


@registry.register
class AccuracyReward(RewardFunction):
    """1 for the right answer, which is `ground_truth` or else `solution`. With `split_on_think_tag` only the text after
    `</think>` counts, and only where it holds at most `max_boxed_threshold` boxes."""

    def __init__(
        self,
        tolerance: float = 1e-6,
        split_on_think_tag: bool = True,
        max_boxed_threshold: int = 6,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.tolerance = tolerance
        self.split_on_think_tag = split_on_think_tag
        self.max_boxed_threshold = max_boxed_threshold

    def compute(
        self, completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
    ) -> list[float]:
        gold = solution if ground_truth is None else ground_truth
        if gold is None:
            log.warning("%s has neither solution nor ground_truth; %d completions get 0", self.name, len(completions))
            return [0.0] * len(completions)
        pairs = zip(completions, one_each(gold, completions), strict=False)
        return [self._score(self.get_content(completion), right) for completion, right in pairs]

    def _score(self, content: Any, gold: Any) -> float:
        if not isinstance(content, str):
            return 0.0
        answer = behind_thought(content, self.max_boxed_threshold) if self.split_on_think_tag else content
        return 0.0 if answer is None else float(is_right(answer, gold, self.tolerance))


def accuracy_reward(
    completions: list[Any], solution: Any = None, ground_truth: Any = None, **kwargs: Any
) -> list[float]:
    """`AccuracyReward` with its defaults."""
    return AccuracyReward().compute(completions, solution=solution, ground_truth=ground_truth, **kwargs)
