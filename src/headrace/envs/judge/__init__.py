"""Answers that another model judges."""

from headrace.envs.judge.env import JudgeConfig, JudgeEnv

__all__ = ["JudgeConfig", "JudgeEnv"]
