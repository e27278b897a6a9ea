"""Rewards for reasoning in think tags, followed by a response that holds the solution."""

from __future__ import annotations

import re
from typing import Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction, log, one_each

BLOCK = re.compile(r"<think>.*?</think>", re.DOTALL)
PARTS = re.compile(r"<think>\s*(.*?)\s*</think>\s*(.*)", re.DOTALL)


def parse_reasoning_response(text: Any) -> dict[str, Any]:
    """`thinking_content` and `response`; without a think block, or with several, the whole text is the response."""
    whole = text if isinstance(text, str) else str(text)
    several = isinstance(text, str) and len(BLOCK.findall(whole)) > 1
    parts = PARTS.search(whole) if isinstance(text, str) and not several else None
    if parts is None:
        return {"thinking_content": "", "response": whole, "multiple_thinking": several}
    thinking, response = parts.groups()
    return {"thinking_content": thinking.strip(), "response": response.strip(), "multiple_thinking": False}


@registry.register
class FormatReasoningReward(RewardFunction):
    """`reward_value` for exactly one non-empty think block followed by a response; each condition can be switched
    off."""

    def __init__(
        self,
        reward_value: float = 0.5,
        require_thinking: bool = True,
        require_response: bool = True,
        allow_multiple_thinking: bool = False,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.reward_value = reward_value
        self.require_thinking = require_thinking
        self.require_response = require_response
        self.allow_multiple_thinking = allow_multiple_thinking

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self.reward_value if self._is_good(completion) else 0.0 for completion in completions]

    def _is_good(self, completion: Any) -> bool:
        found = parse_reasoning_response(self.get_content(completion))
        return bool(
            (found["thinking_content"] or not self.require_thinking)
            and (found["response"] or not self.require_response)
            and (self.allow_multiple_thinking or not found["multiple_thinking"])
        )


@registry.register
class AccuracyXReward(RewardFunction):
    """`reward_value` for a response that contains the solution, or, with `exact_match`, equals it."""

    def __init__(
        self,
        exact_match: bool = False,
        case_sensitive: bool = False,
        reward_value: float = 1.0,
        weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.exact_match = exact_match
        self.case_sensitive = case_sensitive
        self.reward_value = reward_value

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        if solution is None:
            log.warning("%s has no solution to look for; %d completions get 0", self.name, len(completions))
            return [0.0] * len(completions)
        pairs = zip(completions, one_each(solution, completions), strict=False)
        return [self.reward_value if self._is_right(*pair) else 0.0 for pair in pairs]

    def _is_right(self, completion: Any, solution: Any) -> bool:
        wanted = solution if isinstance(solution, str) else self.get_content(solution)
        response = parse_reasoning_response(self.get_content(completion))["response"]
        if not self.case_sensitive:
            wanted, response = wanted.lower(), response.lower()
        return bool(response == wanted if self.exact_match else wanted in response)


@registry.register
class R1Reward(RewardFunction):
    """The weighted sum of format and accuracy."""

    def __init__(
        self, format_weight: float = 0.5, accuracy_weight: float = 1.0, weight: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(weight=weight, **kwargs)
        self.format_weight = format_weight
        self.accuracy_weight = accuracy_weight
        self.format_reward_fn = FormatReasoningReward(reward_value=1.0)
        self.accuracy_reward_fn = AccuracyXReward(reward_value=1.0)

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        formats = self.format_reward_fn.compute(completions, **kwargs)
        right = self.accuracy_reward_fn.compute(completions, solution=solution, **kwargs)
        pairs = zip(formats, right, strict=False)
        return [form * self.format_weight + hit * self.accuracy_weight for form, hit in pairs]


def format_reasoning_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """`FormatReasoningReward` with its defaults."""
    return FormatReasoningReward(reward_value=0.5).compute(completions, **kwargs)


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """`AccuracyXReward` with its defaults."""
    return AccuracyXReward().compute(completions, solution=solution, **kwargs)


def r1_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """`R1Reward` with its defaults."""
    return R1Reward().compute(completions, solution=solution, **kwargs)
