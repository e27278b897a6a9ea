"""From rewards to a loss: advantages, how much each token counts, and the losses. Pure functions of arrays and tensors.

A trajectory counts once in its group, however many branches it has. A loss is a plain sum over target tokens, weighted
by `token_weights`, which are laid down for a whole minibatch before it is cut into forward passes: accumulating over
several passes gives the same gradient as one.

`ratio` is exp(log-prob now - log-prob then): then is when the token was sampled (`old: rollout`), or the weights before
this batch (`old: proximal`, with an importance weight for the rest of the way).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.data.errors import InvalidInput, shown
from headrace.data.sequence import Sequence

Floats = npt.NDArray[np.float64]

#: Keeps a division by a standard deviation near 0 finite.
EPS = 1e-6
#: Probability below which what a teacher left to tokens that it did not name is rounding.
REST_EPS = 1e-6


def group_advantages(rewards: Seq[Seq[float]], how: str) -> list[Floats]:
    """One advantage for each trajectory, group by group. What is compared with what: the trajectories of one group, or
    with `reinforce` all of the batch.

    - `grpo`: (r - mean) / (std + eps), with the sample's standard deviation;
    - `dr_grpo`: r - mean;
    - `rloo`: r - the mean of the others;
    - `reinforce`: r - the mean of the batch.

    A group of one is compared with the batch, in the same way, where the batch has more than one trajectory.
    """
    if how not in ADVANTAGES:
        raise InvalidInput(f"advantage is {shown(how)}; it is one of {', '.join(ADVANTAGES)}")
    groups = [np.asarray(group, np.float64) for group in rewards]
    batch = np.concatenate(groups) if groups else np.zeros(0)
    if how == "reinforce":
        return [group - batch.mean() for group in groups]
    compare = ADVANTAGES[how]
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


ADVANTAGES = {"grpo": _grpo, "dr_grpo": _centred, "rloo": _rloo, "reinforce": _centred}


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
    if how not in ADVANTAGES:
        raise InvalidInput(f"advantage is {shown(how)}; it is one of {', '.join(ADVANTAGES)}")
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


Float32s = npt.NDArray[np.float32]


def token_weights(sequences: Seq[Sequence], how: str, constant_length: int = 1024) -> list[Float32s]:
    """How much each token counts: one array for each sequence, one entry for each token, 0 where it is no target.

    - `token`: every target counts alike;
    - `sequence`: every sequence counts alike, and within it every target;
    - `step`: every LLM call counts alike, and within it every target;
    - `constant`: a sum over targets, divided by the number of sequences and a fixed length (Dr. GRPO's).
    """
    masks = [sequence.loss_mask for sequence in sequences]
    if how == "token":
        total = max(sum(int(mask.sum()) for mask in masks), 1)
        return [np.float32(1 / total) * mask for mask in masks]
    if how == "sequence":
        count = max(sum(bool(mask.any()) for mask in masks), 1)
        return [np.float32(1 / (count * max(int(mask.sum()), 1))) * mask for mask in masks]
    if how == "step":
        steps = [_steps(sequence) for sequence in sequences]
        count = max(sum(len(np.unique(found[found >= 0])) for found in steps), 1)
        return [_even(found) / np.float32(count) for found in steps]
    if how == "constant":
        return [np.float32(1 / (len(masks) * constant_length)) * mask for mask in masks]
    raise InvalidInput(f"aggregation is {shown(how)}; it is one of token, sequence, step, constant")


def _steps(sequence: Sequence) -> npt.NDArray[np.int64]:
    """For each target the index of its span; -1 elsewhere."""
    found = np.full(len(sequence), -1, np.int64)
    for at, span in enumerate(sequence.spans):
        found[span.start : span.end] = at
    return np.where(sequence.loss_mask, found, -1)


def _even(steps: npt.NDArray[np.int64]) -> Float32s:
    """Weights that sum to 1 over the targets of each step."""
    weights = np.zeros(len(steps), np.float32)
    for step in np.unique(steps[steps >= 0]):
        here = steps == step
        weights[here] = 1 / here.sum()
    return weights


def ppo(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    low: float,
    high: float,
    importance: Tensor | None = None,
) -> Tensor:
    """PPO's clipped surrogate. `importance` multiplies it, without a gradient of its own."""
    ratio = torch.exp(log_probs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if importance is not None:
        gain = gain * importance.detach()
    return -(weights * gain).sum()


def tis(log_probs: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, *, cap: float) -> Tensor:
    """REINFORCE with truncated importance sampling: the ratio, at most `cap`, is a weight without a gradient."""
    importance = torch.exp(log_probs.detach() - old).clamp(max=cap)
    return -(weights * importance * advantages * log_probs).sum()


def truncated_importance(proximal: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """The ratio of a token's probability under the weights before this batch to that when it was sampled, at most
    `cap`."""
    return torch.exp(proximal - rollout).clamp(max=cap)


def kl(log_probs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) at each sampled token, by Schulman's estimators k2 or k3. k1, the plain difference, is
    not offered: its gradient is 0 in expectation."""
    difference = reference - log_probs
    if estimator == "k2":
        return difference.square() / 2
    return torch.exp(difference) - 1 - difference


def teacher_distance(log_probs: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || policy) at each target, of the candidates [M, K] that the teacher gave log-probs for; all other
    tokens together are one more. A candidate of -inf with either is none; a row without candidates has no distance.

    Never negative, and 0 exactly where the policy agrees on every candidate: for one candidate as for all of them.
    """
    known = (teacher > -torch.inf) & (log_probs > -torch.inf)
    own = torch.where(known, log_probs, 0.0)
    p = torch.where(known, teacher.exp(), 0.0)
    inside = (p * (torch.where(known, teacher, 0.0) - own)).sum(-1)
    rest = (1 - p.sum(-1)).clamp(min=0.0)
    left = (1 - torch.where(known, log_probs.exp(), 0.0).sum(-1)).clamp(min=REST_EPS)
    # What rounding leaves of a teacher that named every token is no other token.
    outside = torch.where(rest > REST_EPS, rest * (rest.clamp(min=REST_EPS).log() - left.log()), 0.0)
    return torch.where(known.any(-1), inside + outside, 0.0)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> Tensor:
    """The critic's squared error, clipped as in PPO: the larger of that of the value and that of the value held near
    its old one."""
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * (weights * torch.maximum((values - returns).square(), (held - returns).square())).sum()


def is_clipped(log_probs: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Which tokens have no gradient because of the clip."""
    ratio = torch.exp(log_probs - old)
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
