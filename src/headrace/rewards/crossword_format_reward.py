"""Whether a completion answers in a crossword's format: `1-Across: WORD`."""

from __future__ import annotations

import re
from typing import Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction

LINE = re.compile(r"\d+-(?:Across|Down):\s+[A-Z\s]+", re.IGNORECASE)
WORD = re.compile(r"(?:Across|Down):\s+([A-Za-z]+)", re.IGNORECASE)


@registry.register
class CrosswordFormatReward(RewardFunction):
    """`reward_value` where a pattern is found, and every word is of valid letters if others are penalised."""

    def __init__(
        self,
        format_patterns: list[re.Pattern[str]] | None = None,
        reward_value: float = 1.0,
        penalize_invalid_chars: bool = True,
        valid_chars: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.reward_value = reward_value
        self.penalize_invalid_chars = penalize_invalid_chars
        self.valid_chars = valid_chars.upper()
        self.format_patterns = format_patterns or [LINE]

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.reward_value if self._is_good(self.get_content(one)) else 0.0 for one in completions]

    def _is_good(self, content: str) -> bool:
        letters = {letter.upper() for word in WORD.findall(content) for letter in word}
        valid = not self.penalize_invalid_chars or letters <= set(self.valid_chars)
        return valid and any(pattern.search(content) for pattern in self.format_patterns)


def crossword_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """`CrosswordFormatReward` with its defaults."""
    return CrosswordFormatReward().compute(completions, **kwargs)
