"""Which trajectories of a group are learned from: functions of a `FilterGroup`, a user's as those that ship
(`FILTERS`); and DAPO's penalty for long answers.

A filter returns whether a group is learned from, or an array that says so for each of its trajectories. What it leaves
out still counts in the comparison that made the others' advantages, as in DAPO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.data.trajectory import Trajectory
from headrace.trainer.advantages import Floats
from headrace.trainer.config import OverlongConfig

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FilterGroup:
    """One group: N trajectories of one prompt.

    rewards       float64[N]  NaN where a trajectory has none, which only `loss: sft` and `advantage: none` allow
    tokens        int64[N]    how many were sampled
    truncated     bool[N]     whether the last answer ended by its length
    trajectories              all else: `metadata`, `steps`, ...
    """

    rewards: Floats
    tokens: npt.NDArray[np.int64]
    truncated: Bools
    trajectories: tuple[Trajectory, ...] = ()

    @classmethod
    def of(cls, trajectories: list[Trajectory], rewards: list[float | None]) -> FilterGroup:
        """The group of these trajectories, with their rewards in the same order."""
        return cls(
            np.array([np.nan if reward is None else reward for reward in rewards], np.float64),
            np.array([sampled_tokens(one) for one in trajectories], np.int64),
            np.array([_is_truncated(one) for one in trajectories], np.bool_),
            tuple(trajectories),
        )


FilterFunction = Callable[..., bool | Bools]


def accuracy(group: FilterGroup, *, low: float = 0.0, high: float = 1.0, correct: float = 1.0) -> bool:
    """DAPO's dynamic sampling: the share of rewards of at least `correct` lies between `low` and `high`, and is neither
    of them. Unlike equal rewards, this also leaves out groups that differ in nothing but a part of the reward."""
    return bool(low < np.mean(group.rewards >= correct) < high)


def min_reward(group: FilterGroup, *, at_least: float) -> Bools:
    """Trajectories with a reward of at least so much: what is worth imitating."""
    return np.asarray(group.rewards >= at_least)


def overlong(group: FilterGroup) -> Bools:
    """DAPO's overlong filtering: trajectories whose last answer ended by itself, and not by its length."""
    return np.asarray(~group.truncated)


#: The filters that ship, by their names in a configuration.
FILTERS: dict[str, FilterFunction] = {"accuracy": accuracy, "min_reward": min_reward, "overlong": overlong}


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """What is taken off the reward of a trajectory with so many sampled tokens."""
    over = tokens - (config.max_tokens - config.buffer)
    return config.penalty * min(max(over / config.buffer, 0.0), 1.0)


def sampled_tokens(trajectory: Trajectory) -> int:
    """How many tokens of a trajectory were sampled, over all of its steps."""
    return sum(record.head.n_response for record in trajectory.tree.records.values())


def _is_truncated(trajectory: Trajectory) -> bool:
    records = trajectory.tree.records
    return bool(records) and records[max(records)].head.unpack_extra().finish_reason == "length"
