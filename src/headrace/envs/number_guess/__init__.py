"""Find a number with "higher" and "lower"."""

from headrace.envs.number_guess.env import NumberGuessConfig, NumberGuessEnv

__all__ = ["NumberGuessConfig", "NumberGuessEnv"]
