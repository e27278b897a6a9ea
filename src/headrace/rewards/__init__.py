"""Rewards of completions: functions that environments name, weigh and combine.

reward = registry.create({"type": "format", "weight": 0.5, "preferred_tags": ["answer"]})
scores = reward(["<answer>4</answer>", "4"])    # [0.5, 0.0]

A reward is a `RewardFunction` of one file here, or one of your own under `@registry.register`. Each file is loaded when
its reward is first asked for, so that what it needs is needed by those who use it.
"""

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction

from headrace.rewards.combined_reward import CombinedReward  # isort: skip  # it registers itself

__all__ = ["CombinedReward", "RewardFunction", "registry"]
