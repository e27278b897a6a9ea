"""A reward for a right answer, and more for one with its reasoning in think tags."""

from __future__ import annotations

import re
from typing import Any

from headrace.rewards.answers import behind_thought, is_right
from headrace.rewards.reward_function import one_each

FORM = re.compile(r"^<think>[^<]*</think>[^<]*$", re.DOTALL)
MOST_BOXES = 6


def get_completion_content(completion: Any) -> str:
    """The text of a completion, whatever the role of its message."""
    first = completion[0] if isinstance(completion, list) and completion else completion
    if isinstance(first, dict) and "content" in first:
        return str(first["content"])
    if isinstance(completion, dict) and isinstance(completion.get("message"), dict):
        return str(completion["message"].get("content", ""))
    return str(completion)


def format_reward(completions: list[Any], reward_value: float = 0.5, **kwargs: Any) -> list[float]:
    """`reward_value` for one think block followed by an answer, without other tags."""
    contents = map(get_completion_content, completions)
    return [reward_value if FORM.match(content) else 0.0 for content in contents]


def accuracy_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """1 for the right answer after the think block."""
    found = []
    for completion, gold in zip(completions, one_each(solution, completions), strict=False):
        answer = behind_thought(get_completion_content(completion), MOST_BOXES)
        found.append(0.0 if answer is None else float(is_right(answer, gold)))
    return found


def cascading_r1_math_reward(completions: list[Any], solution: Any, **kwargs: Any) -> list[float]:
    """The accuracy, and, where that is not 0, the format on top of it."""
    right = accuracy_reward(completions, solution, **kwargs)
    pairs = zip(right, format_reward(completions), strict=False)
    return [hit + (form if hit > 0 else 0.0) for hit, form in pairs]
