"""Arithmetic with a calculator to call."""

from headrace.envs.tool_calc.env import ToolCalcConfig, ToolCalcEnv

__all__ = ["ToolCalcConfig", "ToolCalcEnv"]
