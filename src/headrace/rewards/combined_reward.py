"""Several rewards as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction, log


@registry.register
class CombinedReward(RewardFunction):
    """The sum of what rewards compute, before their weights.

    `normalization` is `none`, `sum` (over the sum of their weights) or `minmax` (the completions' own range as 0 to 1).
    A completion at which one of them raises has no sum: it gets NaN, as it does from that one alone.
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
        """What one of the rewards computes; where it raises, for each completion alone, or with `all_zero_on_error`
        nothing."""
        try:
            return reward.compute(completions, **kwargs)
        except Exception:  # an author's reward may raise anything
            if not self.all_zero_on_error:
                return reward.one_by_one(completions, **kwargs)
            reward.failed += len(completions)
            log.exception("the reward %s failed and is left out of the sum", reward.name)
            return ()
