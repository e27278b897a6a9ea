"""The problems of the `reasoning_gym` package."""

from headrace.envs.reasoning_gym.env import ReasoningGymConfig, ReasoningGymEnv

__all__ = ["ReasoningGymConfig", "ReasoningGymEnv"]
