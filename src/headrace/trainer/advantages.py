"""From rewards to advantages: pure functions of arrays.

A trajectory counts once in its group, however many branches it has. What is compared with what: the trajectories of one
group (`grpo`, `dr_grpo`, `rloo`), or all of the batch (`reinforce`, and any group of one, which has nobody else).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from headrace.data.errors import InvalidInput, shown

Floats = npt.NDArray[np.float64]

#: Keeps the division by a spread of nearly nothing finite.
EPS = 1e-6


def of_groups(rewards: Seq[Seq[float]], how: str) -> list[Floats]:
    """One advantage a trajectory, group by group.

    - `grpo`: (r - mean) / (std + eps), with the sample's standard deviation;
    - `dr_grpo`: r - mean;
    - `rloo`: r - the mean of the others;
    - `reinforce`: r - the mean of the batch.

    A group of one is compared with the batch, in the same way, where the batch has more than one trajectory.
    """
    if how not in KINDS:
        raise InvalidInput(f"advantage is {shown(how)}; it is one of {', '.join(KINDS)}")
    groups = [np.asarray(group, np.float64) for group in rewards]
    batch = np.concatenate(groups) if groups else np.zeros(0)
    if how == "reinforce":
        return [group - batch.mean() for group in groups]
    compare = KINDS[how]
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


KINDS = {"grpo": _grpo, "dr_grpo": _centred, "rloo": _rloo, "reinforce": _centred}


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
