"""Whether a completion has the tags that were asked for."""

from __future__ import annotations

import re
from typing import Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction


@registry.register
class FormatReward(RewardFunction):
    """1 for a completion with one of the tags, or with all of them where all are required; by default `think` and
    `answer`."""

    def __init__(
        self,
        preferred_tags: list[str] | None = None,
        require_all_tags: bool = False,
        case_sensitive: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.preferred_tags = preferred_tags or ["think", "answer"]
        self.require_all_tags = require_all_tags
        self.case_sensitive = case_sensitive

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        flags = re.DOTALL if self.case_sensitive else re.DOTALL | re.IGNORECASE
        patterns = [re.compile(f"<{tag}>.*?</{tag}>", flags) for tag in self.preferred_tags]
        enough = all if self.require_all_tags else any
        contents = map(self.get_content, completions)
        return [float(enough(pattern.search(content) for pattern in patterns)) for content in contents]


def format_reward(completions: list[Any], preferred_tags: list[str] | None = None, **kwargs: Any) -> list[float]:
    """`FormatReward` with its defaults, for these tags."""
    return FormatReward(preferred_tags=preferred_tags).compute(completions, **kwargs)
