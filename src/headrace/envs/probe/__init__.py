"""What an environment's reward pays for, seen before any model is: `headrace env FILE probe`.

Policies that need no model answer in the place of one. What they earn says how low and how high the reward goes,
whether it is the same again, how long it takes, and how much of it is to be had without an answer.
"""

from headrace.envs.probe.command import ProbeSubcommand, probe
from headrace.envs.probe.policies import POLICIES, ProbePolicy
from headrace.envs.probe.report import ProbeReport

__all__ = ["POLICIES", "ProbeSubcommand", "ProbePolicy", "ProbeReport", "probe"]
