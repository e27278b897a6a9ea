"""What a run would be, told without beginning it: its configuration, the memory it needs, the first batch's shape.

Nothing is changed: a batch is looked at under a lease that is given back.
"""

from __future__ import annotations

from typing import Any

import torch
import yaml

from headrace.data.errors import HeadraceError
from headrace.trainer.config import TrainerConfig
from headrace.trainer.examples import examples_of
from headrace.trainer.trainer import device_of

GIB = 1 << 30
#: A weight, its gradient and AdamW's two averages, in float32.
LEARNING = 16
#: A look at a batch is over within this.
LEASE_S = 60.0


def dry_run(config: TrainerConfig) -> str:
    parts = {
        "configuration": config.shown(),
        "memory": memory(config),
        "first batch": first_batch(config),
    }
    return "\n".join(f"# {name}\n{yaml.safe_dump(part, sort_keys=False).rstrip()}" for name, part in parts.items())


def memory(config: TrainerConfig) -> dict[str, Any]:
    """GiB by what they are for. Activations are an estimate: what a layer of a Llama keeps of each token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        model = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise HeadraceError(f"model {config.model} cannot be read: {error}") from error
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(model).num_parameters()
    width = 2 if config.dtype == "bfloat16" else 4
    middle = getattr(model, "intermediate_size", None) or 4 * model.hidden_size
    kept = model.num_hidden_layers * (8 * model.hidden_size + 3 * middle) * width
    logits = 3 * 4 * model.vocab_size
    tokens = config.optimizer.tokens
    found = {
        "weights, gradients, optimizer": weights * LEARNING,
        "activations (about)": tokens * kept,
        "logits (at most)": min(tokens * logits, 3 * 4 << 28),
        "the copy that is published": weights * 4 if config.sync is not None else 0,
        "reference": weights * 4 if config.algorithm.kl else 0,
        "critic": weights * LEARNING if config.algorithm.advantage == "gae" else 0,
    }
    rows: dict[str, Any] = {name: f"{size / GIB:.2f} GiB" for name, size in found.items() if size}
    return {
        "parameters": weights,
        **rows,
        "together": f"{sum(found.values()) / GIB:.2f} GiB on {device_of(config.device)}",
    }


def first_batch(config: TrainerConfig) -> dict[str, Any]:
    wanted = config.pool
    pool = wanted.connected(retry_s=2.0)
    batch = pool.fetch_batch(
        wanted.batch_size, n_rollouts=wanted.n_rollouts, channel=wanted.channel, lease_s=LEASE_S, timeout=0
    )
    if batch is None:
        ready = pool.stats(wanted.channel)["groups"]["ready"]
        return {"groups": f"{ready} of the {wanted.batch_size} that a batch takes are ready in {wanted.channel!r}"}
    try:
        found = examples_of(batch.groups, config.algorithm, config.max_length)
        lengths = sorted(map(len, found.sequences))
        return {
            "groups": found.groups,
            "trajectories": sum(len(group.trajectories) for group in batch.groups),
            "sequences": len(found.sequences),
            "tokens": sum(lengths),
            "targets": found.targets,
            "longest": lengths[-1] if lengths else 0,
            "reward": sum(found.rewards) / len(found.rewards) if found.rewards else None,
            "left out": {name: count for name, count in vars(found.left).items() if count},
        }
    finally:
        batch.nack()
