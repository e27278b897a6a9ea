"""Losses: functions of a `LossBatch`, a user's as those that ship (`LOSSES`), and the terms that are added to them.

A loss is a plain sum over target tokens, each times its weight, so that the losses of several forward passes add up to
that of one. It returns one number with a gradient, or that and a mapping of metrics: numbers, or tensors over the
targets, of which the mean is told.

`ratio` is exp(log-prob now - log-prob then): then is when the token was sampled (`old: rollout`), or the weights before
this batch (`old: proximal`, with an importance weight for the rest of the way).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.trainer.config import AlgorithmConfig

#: Probability below which what a teacher left to tokens that it did not name is rounding.
REST_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class LossBatch:
    """The targets of one forward pass: M of them, all those of S sequences.

    log_probs          float32[M]  the policy's, with a gradient
    old_log_probs      float32[M]  what ratios are against: the rollout's, or with `old: proximal` those of the weights
                                   before this batch
    rollout_log_probs  float32[M]  those at sampling; where none was recorded, those of the weights before this batch
    importance         float32[M]  exp(old - rollout), at most `cap`; 1 with `old: rollout`
    advantages         float32[M]
    weights            float32[M]  each target's share of the loss, by `aggregation`: they sum to 1 over a minibatch,
                                   except for `constant`
    entropy            float32[M]  of the distribution that each was sampled from; with a gradient only where
                                   `algorithm.entropy` is set
    sequence           int64[M]    which of the S sequences each belongs to, from 0
    sequences          int         S
    versions           int64[M]    of the policy that sampled each
    version            int         that the policy was last published as
    algorithm                      the configuration: `clips`, `cap`, ...
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    importance: Tensor
    advantages: Tensor
    weights: Tensor
    entropy: Tensor
    sequence: Tensor
    sequences: int
    versions: Tensor
    version: int
    algorithm: AlgorithmConfig


Metrics = Mapping[str, Tensor | float]
LossFunction = Callable[..., Tensor | tuple[Tensor, Metrics]]


def ppo(batch: LossBatch) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, times the importance weight."""
    ratio = torch.exp(batch.log_probs - batch.old_log_probs)
    return _clipped(batch, ratio)


def gspo(batch: LossBatch) -> tuple[Tensor, Metrics]:
    """GSPO: PPO's surrogate with one ratio for all targets of a sequence, the geometric mean of theirs.

    The gradient is that of GSPO-token: each target's log-prob times the sequence's ratio. Where the targets of a
    sequence have one advantage and one weight, as with `aggregation: sequence`, that is the plain one's.
    """
    moved = (batch.log_probs - batch.old_log_probs).detach()
    total = moved.new_zeros(batch.sequences).index_add(0, batch.sequence, moved)
    count = moved.new_zeros(batch.sequences).index_add(0, batch.sequence, torch.ones_like(moved))
    ratio = torch.exp(total / count.clamp(min=1))[batch.sequence]
    # The value of the sequence's ratio, the gradient of the target's own log-prob.
    return _clipped(batch, ratio * torch.exp(batch.log_probs - batch.log_probs.detach()))


def _clipped(batch: LossBatch, ratio: Tensor) -> tuple[Tensor, Metrics]:
    low, high = batch.algorithm.clips
    advantages = batch.advantages
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    held = ratio.detach()
    clipped = ((held > 1 + high) & (advantages > 0)) | ((held < 1 - low) & (advantages < 0))
    return -(batch.weights * batch.importance * gain).sum(), {"clip_fraction": clipped}


def tis(batch: LossBatch) -> tuple[Tensor, Metrics]:
    """REINFORCE with truncated importance sampling: the ratio to the rollout's probability, at most `cap`, is a weight
    without a gradient."""
    ratio = torch.exp(batch.log_probs.detach() - batch.rollout_log_probs)
    weight = ratio.clamp(max=batch.algorithm.cap)
    loss = -(batch.weights * weight * batch.advantages * batch.log_probs).sum()
    return loss, {"clip_fraction": ratio > batch.algorithm.cap}


def cispo(batch: LossBatch) -> tuple[Tensor, Metrics]:
    """CISPO: the ratio, held within the clip, is a weight without a gradient; so no target loses its gradient."""
    low, high = batch.algorithm.clips
    ratio = torch.exp(batch.log_probs.detach() - batch.old_log_probs)
    weight = ratio.clamp(1 - low, 1 + high) * batch.importance
    loss = -(batch.weights * weight * batch.advantages * batch.log_probs).sum()
    return loss, {"clip_fraction": (ratio > 1 + high) | (ratio < 1 - low)}


def sft(batch: LossBatch) -> Tensor:
    """Supervised: every target's log-prob is raised, whatever its advantage and whoever sampled it."""
    return -(batch.weights * batch.log_probs).sum()


#: The losses that ship, by their names in a configuration.
LOSSES: dict[str, LossFunction] = {"ppo": ppo, "tis": tis, "gspo": gspo, "cispo": cispo, "sft": sft}


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
