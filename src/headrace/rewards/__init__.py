"""What an answer is worth.

A `Reward` scores samples by weighted sources: rules, a judge, a reward model, functions of your own.

    reward = Reward(RewardConfig.of({"rules": [{"use": "exact_match"}]}, Path()))
    (score,) = await reward.score([Sample(text="4", ground_truth="4")])     # Score(1.0, {"exact_match": 1.0})

A sample that could not be scored is a `RewardFailure` with its reason, never a zero.

Environments name, weigh and combine functions of completions, as in Atropos:

    reward = registry.create({"type": "format", "weight": 0.5, "preferred_tags": ["answer"]})
    scores = reward(["<answer>4</answer>", "4"])    # [0.5, 0.0]

Such a reward is a `RewardFunction` of one file here, or one of your own under `@registry.register`. The registry finds
a reward by its file's name, `NAME_reward.py`, as Atropos' does, and loads it when it is first asked for: so every
reward has a file of its own, however small, and what it imports is needed by its users only.
"""

from typing import TYPE_CHECKING, Any

from headrace.rewards.registry import registry
from headrace.rewards.reward_function import RewardFunction
from headrace.rewards.sample import RewardFailure, Sample, Score

from headrace.rewards.combined_reward import CombinedReward  # isort: skip  # it registers itself

if TYPE_CHECKING:
    from headrace.rewards.config import RewardConfig, RewardFunctionConfig, RuleConfig
    from headrace.rewards.judge import RewardJudgeConfig
    from headrace.rewards.reward import Reward
    from headrace.rewards.reward_model import RewardModelConfig
    from headrace.rewards.rule import Rule
    from headrace.rewards.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxUnavailable
    from headrace.rewards.source import RewardCounters
    from headrace.rewards.worker import LocalRewardWorker, RewardWorker

__all__ = [
    "Reward",
    "RewardConfig",
    "RuleConfig",
    "RewardJudgeConfig",
    "RewardModelConfig",
    "RewardFunctionConfig",
    "Sample",
    "Score",
    "RewardFailure",
    "RewardCounters",
    "RewardWorker",
    "LocalRewardWorker",
    "Rule",
    "Sandbox",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailable",
    "CombinedReward",
    "RewardFunction",
    "registry",
]

_HOME = {
    "Reward": "reward",
    "RewardConfig": "config",
    "RewardFunctionConfig": "config",
    "RuleConfig": "config",
    "RewardJudgeConfig": "judge",
    "RewardModelConfig": "reward_model",
    "RewardCounters": "source",
    "RewardWorker": "worker",
    "LocalRewardWorker": "worker",
    "Rule": "rule",
    "Sandbox": "sandbox",
    "SandboxLimits": "sandbox",
    "SandboxResult": "sandbox",
    "SandboxUnavailable": "sandbox",
}


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: an environment's rewards, and the processes in which functions run, need few
    of them."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.rewards' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.rewards.{_HOME[name]}"), name)
