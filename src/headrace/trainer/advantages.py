"""From rewards to advantages. Pure functions of arrays.

An advantage is a function of an `AdvantageBatch`, a user's as those that ship (`ADVANTAGES`): it returns for each group
one number a trajectory, or one array a trajectory with a number a step. A trajectory counts once in its group, however
many branches it has.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.data.errors import InvalidInput, shown

Floats = npt.NDArray[np.float64]
#: What an advantage returns: for each group, an array with a number a trajectory, or a list with an array a trajectory.
GroupAdvantages = Seq[Floats | Seq[Floats]]

#: Keeps a division by a standard deviation near 0 finite.
EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class AdvantageBatch:
    """The rewards of all groups of a batch; trajectories without one are not in it.

    rewards       for each group one array: what each of its trajectories earned in all
    step_rewards  for each group, for each trajectory, one array: what each of its steps earned; where only the outcome
                  is rewarded, or with `process_rewards: false`, all of it at the last step
    """

    rewards: list[Floats]
    step_rewards: list[list[Floats]]


AdvantageFunction = Callable[..., GroupAdvantages]


def compared(batch: AdvantageBatch, how: str) -> GroupAdvantages:
    """The advantages of `step_advantages` where steps before the last are rewarded, else of `group_advantages`."""
    if any(steps[:-1].any() for group in batch.step_rewards for steps in group):
        return step_advantages(batch.step_rewards, how)
    return group_advantages(batch.rewards, how)


def no_advantages(batch: AdvantageBatch) -> GroupAdvantages:
    """0 for all: what is learned comes from a teacher, or from what environments say about tokens."""
    return [np.zeros(len(group)) for group in batch.rewards]


def group_advantages(rewards: Seq[Seq[float] | Floats], how: str) -> list[Floats]:
    """One advantage for each trajectory, group by group. What is compared with what: the trajectories of one group, or
    with `reinforce` all of the batch.

    - `grpo`: (r - mean) / (std + eps), with the sample's standard deviation;
    - `dr_grpo`: r - mean;
    - `rloo`: r - the mean of the others;
    - `reinforce`: r - the mean of the batch.

    A group of one is compared with the batch, in the same way, where the batch has more than one trajectory.
    """
    if how not in _COMPARED:
        raise InvalidInput(f"advantage is {shown(how)}; it is one of {', '.join(_COMPARED)}")
    groups = [np.asarray(group, np.float64) for group in rewards]
    batch = np.concatenate(groups) if groups else np.zeros(0)
    if how == "reinforce":
        return [group - batch.mean() for group in groups]
    compare = _COMPARED[how]
    # Groups of one stand among all trajectories of the batch; what they get is their place there.
    alone = compare(batch) if any(len(group) == 1 for group in groups) else batch
    ends = np.cumsum([len(group) for group in groups])
    return [compare(group) if len(group) > 1 else alone[end - 1 : end] for group, end in zip(groups, ends, strict=True)]


def _centred(rewards: Floats) -> Floats:
    rewards = rewards - rewards[:1]  # so that equal rewards give 0, and no rounding of their mean
    return np.asarray(rewards - rewards.mean())


def _grpo(rewards: Floats) -> Floats:
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    centred = _centred(rewards)
    return np.asarray(centred / (centred.std(ddof=1) + EPS))


def _rloo(rewards: Floats) -> Floats:
    return _centred(rewards) * (len(rewards) / max(len(rewards) - 1, 1))


_COMPARED = {"grpo": _grpo, "dr_grpo": _centred, "rloo": _rloo, "reinforce": _centred}


def step_advantages(rewards: Seq[Seq[Seq[float] | Floats]], how: str) -> list[list[Floats]]:
    """One advantage for each step, trajectory by trajectory, of the rewards that each step of it earned.

    With R what a trajectory earned in all and S(k) what it had earned before its step k, that step's deviation is

        D(k) = (R - mean of R) - (S(k) - mean of S(k) over the trajectories that have a step k)

    over the group (`reinforce`: the batch; `rloo`: the others, and where none of them got that far, S(k) is not
    compared). So a reward counts for the step that earned it and for those before it; what every trajectory had earned
    by then makes no difference. The advantage is D(k); with `grpo` D(k) / (std + eps), where std is the square root of
    the sum over trajectories of the mean over their steps of D(k)², divided by their number less one.

    A trajectory counts once, however many steps it has. Where only last steps are rewarded, every step's advantage is
    that of `group_advantages`; trajectories that earned the same at the same steps give 0. A group of one is compared
    with the batch.
    """
    if how not in _COMPARED:
        raise InvalidInput(f"advantage is {shown(how)}; it is one of {', '.join(_COMPARED)}")
    groups = [[np.asarray(steps, np.float64) for steps in group] for group in rewards]
    batch = [steps for group in groups for steps in group]
    alone = _step_deviations(batch, how) if how == "reinforce" or any(len(group) == 1 for group in groups) else batch
    found, end = [], 0
    for group in groups:
        end += len(group)
        among_all = how == "reinforce" or len(group) == 1
        found.append(alone[end - len(group) : end] if among_all else _step_deviations(group, how))
    return found


def _step_deviations(trajectories: list[Floats], how: str) -> list[Floats]:
    """Advantages of the steps of trajectories that are compared with each other."""
    count = len(trajectories)
    if count < 2:
        return [np.zeros_like(steps) for steps in trajectories]
    total = np.array([steps.sum() for steps in trajectories])
    there = np.arange(max(map(len, trajectories))) < np.array([len(steps) for steps in trajectories])[:, None]
    before = np.zeros(there.shape)
    for row, steps in zip(before, trajectories, strict=True):
        row[: len(steps)] = np.cumsum(steps) - steps
    total -= total[0]  # as in `_centred`: equal sums give 0, and no rounding of their mean
    before = np.where(there, before - before[there.argmax(0), np.arange(there.shape[1])], 0.0)
    if how == "rloo":
        others = there.sum(0) - there
        mean_total = (total.sum() - total) / (count - 1)
        mean_before = np.where(others > 0, (before.sum(0) - before) / np.maximum(others, 1), before)
    else:
        mean_total, mean_before = np.full(count, total.mean()), before.sum(0) / there.sum(0)
    deviations = (total - mean_total)[:, None] - (before - mean_before)
    found = [row[: len(steps)] for row, steps in zip(deviations, trajectories, strict=True)]
    if how != "grpo":
        return found
    spread = np.sqrt(sum(np.mean(steps**2) for steps in found) / (count - 1))
    return [steps / (spread + EPS) for steps in found]


def gae(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of one sequence's sampled tokens.

    `rewards[t]` comes after token t, `values[t]` is the critic's guess before it; the sequence ends with its last
    token. Context between two answers takes no time.
    """
    advantages = np.zeros_like(values)
    ahead = 0.0
    for t in range(len(values) - 1, -1, -1):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        ahead = rewards[t] + gamma * after - values[t] + gamma * lam * ahead
        advantages[t] = ahead
    return advantages, advantages + values


#: The advantages that ship, by their names in a configuration; `gae`, which needs a critic, is the learner's.
ADVANTAGES: dict[str, AdvantageFunction] = {
    **{name: partial(compared, how=name) for name in _COMPARED},
    "none": no_advantages,
}
