"""Questions and answers from a file."""

from headrace.envs.jsonl_qa.env import JsonlQaConfig, JsonlQaEnv

__all__ = ["JsonlQaConfig", "JsonlQaEnv"]
