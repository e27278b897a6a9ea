"""The sum of several rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction, log


@registry.register
class CombinedReward(RewardFunction):
    """The sum of several rewards, before their weights.

    `normalization` is `none`, `sum` (divided by the sum of their weights) or `minmax` (scaled so that the completions
    range from 0 to 1). A completion for which one of the rewards raises gets NaN.
    """

    def __init__(
        self,
        rewards: Sequence[str | Mapping[str, Any]],
        normalization: str = "none",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.normalization = normalization
        self.reward_functions = [registry.create(reward) for reward in rewards]

    @property
    def name(self) -> str:
        return f"combined({','.join(reward.name for reward in self.reward_functions)})"

    @property
    def needs_truth(self) -> bool:
        """Whether one of the rewards does."""
        return any(reward.needs_truth for reward in self.reward_functions)

    def set_wandb_logger(self, logger: Any) -> None:
        super().set_wandb_logger(logger)
        for reward in self.reward_functions:
            reward.set_wandb_logger(logger)

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        sums = [0.0] * len(completions)
        if not sums:
            return []
        for reward in self.reward_functions:
            for at, value in enumerate(self._values(reward, completions, kwargs)):
                sums[at] += value
        if self.normalization == "sum":
            total = sum(reward.weight for reward in self.reward_functions)
            return [value / total for value in sums] if total > 0 else sums
        if self.normalization == "minmax":
            known = [value for value in sums if not math.isnan(value)]
            low, high = min(known, default=0.0), max(known, default=0.0)
            return [(value - low) / (high - low) for value in sums] if high > low else sums
        return sums

    def _values(self, reward: RewardFunction, completions: list[Any], kwargs: Mapping[str, Any]) -> Sequence[float]:
        """The rewards of one function; where it raises, those of each completion computed alone, or none with
        `all_zero_on_error`."""
        try:
            return reward.compute(completions, **kwargs)
        except Exception:  # an author's reward may raise anything
            if not self.all_zero_on_error:
                return reward.one_by_one(completions, **kwargs)
            reward.failed += len(completions)
            log.exception("the reward %s failed and is left out of the sum", reward.name)
            return ()
