"""Rewards of completions: functions that environments name, weigh and combine.

reward = registry.create({"type": "format", "weight": 0.5, "preferred_tags": ["answer"]})
scores = reward(["<answer>4</answer>", "4"])    # [0.5, 0.0]

A reward is a `RewardFunction` of one file here, or one of your own under `@registry.register`. The registry finds a
reward by its file's name, `NAME_reward.py`, as Atropos' does, and loads it when it is first asked for: so every reward
has a file of its own, however small, and what it imports is needed by its users only.
"""

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction

from headrace.rewards.combined_reward import CombinedReward  # isort: skip  # it registers itself

__all__ = ["CombinedReward", "RewardFunction", "registry"]
