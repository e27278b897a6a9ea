"""The storm: a whole system under load, to which everything happens that happens in the world, and a checker that holds
what it answered against what was promised.

    plan           which faults, in which order: from a seed
    network        a TCP proxy that drops, delays, duplicates and resets
    services       processes that are killed, frozen and started again
    model_server   the rollout server: every answer told apart, and logged
    dialects       what agents say and read, in four dialects
    agents         trajectories: turns, branches, retries, hang-ups, late rewards
    environment    groups of the Trajectory API, posted and taken
    consumer       the trainer: writes down what it learned from before it acknowledges
    system         all of them, with a link between any two
    log            what happened, by everyone
    checker        what should not have
    storm          the run
    soak           load without faults: what grows
"""

from headrace.storm.checker import BrokenPromise, Report, check
from headrace.storm.plan import QUICK, Sizes
from headrace.storm.storm import random_seed, run_storm

__all__ = ["QUICK", "BrokenPromise", "Report", "Sizes", "check", "random_seed", "run_storm"]
