"""Rewards of the completions on stdin, as JSON: in atroposlib's own Python, or on Headrace."""

import importlib
import importlib.util  # atroposlib's registry needs it to be imported by someone
import json
import sys

asked = json.load(sys.stdin)
if asked["headrace"]:
    importlib.import_module("headrace.compat.atropos")
registry = importlib.import_module("atroposlib.envs.reward_fns").registry
importlib.import_module("atroposlib.envs.reward_fns.r1_reward")


def broken(completions, **kwargs):
    raise ValueError("this one always fails")


registry.register_function("broken", broken)
found = []
for name, options, completions, more in asked["calls"]:
    reward = registry.create({"type": name, **options})
    found.append([reward.name, reward(completions, **more)])
print(json.dumps(found))
