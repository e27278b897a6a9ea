"""The demo's hyper-parameters, and the trainer configuration that is made of them.

A batch holds a multiple of as many groups as there are numbers: each is hidden equally often in it, and the policy is
not biased towards one that happened to come more often.

What keeps a policy from settling on a poor first guess is exploration: an entropy bonus that is large enough for every
guess to be tried now and then, and groups so large that one winning try is compared with fifteen losing ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The reward that counts as learned, and how many steps it is the mean of.
LEARNED_REWARD = 0.95
LEARNED_STEPS = 10


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyper-parameters of one task, under the trainer's names."""

    groups: int = 6
    rollouts: int = 16
    steps: int = 400
    advantage: str = "grpo"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epochs: int = 2
    minibatches: int = 1
    clip: float = 0.2
    clip_high: float = 0.2
    #: Acts on every game, also of groups that all won or all lost: a policy that is sure too early gets out again.
    entropy: float = 0.1
    skip_zero_variance: bool = False
    max_grad_norm: float = 1.0


#: By task. The small game is for tests and quick benchmarks: it is learned in a third of the steps.
RECIPES = {"number": Recipe(), "number3": Recipe(steps=200, lr=2e-3, entropy=0.08)}


def trainer_config(
    recipe: Recipe,
    *,
    model: Path,
    run: Path,
    pool: str,
    gateway: str,
    seed: int,
    steps: int,
    sync_mode: str = "auto",
    checkpoint_every: int = 10,
) -> dict[str, Any]:
    """The configuration for `headrace train`. Batches are not prefetched: the agents have replaced the groups that the
    trainer holds, so a prefetched batch would be two versions old."""
    return {
        "model": str(model),
        "run": str(run),
        "steps": steps,
        "stop_at_reward": LEARNED_REWARD,
        "stop_window": LEARNED_STEPS,
        "seed": seed,
        "device": "cpu",
        "threads": 1,
        "pool": {
            "address": pool,
            "batch_size": recipe.groups,
            "n_rollouts": recipe.rollouts,
            "prefetch": False,
        },
        "algorithm": {
            "advantage": recipe.advantage,
            "clip": recipe.clip,
            "clip_high": recipe.clip_high,
            "entropy": recipe.entropy,
            "skip_zero_variance": recipe.skip_zero_variance,
            "aggregation": "token",
            "mask_truncated": False,
        },
        "optimizer": {
            "lr": recipe.lr,
            "betas": list(recipe.betas),
            "epochs": recipe.epochs,
            "minibatches": recipe.minibatches,
            "max_grad_norm": recipe.max_grad_norm,
        },
        # Files are for vLLM, which cannot read the trainer's shared memory.
        "sync": {"gateway": gateway, "mode": sync_mode, "folder": str(run / "published")},
        "checkpoint": {"every": checkpoint_every},
    }
