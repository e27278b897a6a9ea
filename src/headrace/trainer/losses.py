"""The losses: pure functions of tensors over target tokens, each a weighted sum (see `weighting`).

`ratio` is exp(log-prob now - log-prob then): then is when the token was sampled (`old: rollout`), or the weights before
this batch (`old: proximal`, with an importance weight for the rest of the way).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """REINFORCE under truncated importance sampling: the ratio, at most `cap`, weighs and is not derived."""
    importance = torch.exp(log_probs.detach() - old).clamp(max=cap)
    return -(weights * importance * advantages * log_probs).sum()


def truncated(proximal: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """How much likelier a token was under the weights before this batch than when it was sampled, at most `cap`."""
    return torch.exp(proximal - rollout).clamp(max=cap)


def kl(log_probs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) at each sampled token, by Schulman's estimators k2 or k3.

    k1, the plain difference, is no loss: the expectation of its gradient is 0.
    """
    difference = reference - log_probs
    if estimator == "k2":
        return difference.square() / 2
    return torch.exp(difference) - 1 - difference


def value(values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> Tensor:
    """The critic's squared error, PPO's way: the worse of the value and the value held near its old one."""
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * (weights * torch.maximum((values - returns).square(), (held - returns).square())).sum()


def clipped(log_probs: Tensor, old: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Which tokens the clip leaves without a gradient."""
    ratio = torch.exp(log_probs - old)
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))
