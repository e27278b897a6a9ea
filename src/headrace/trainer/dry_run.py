"""`headrace train --dry-run`: a run's configuration, the memory it needs, what it would do, and the first batch's shape
where the pool answers.

Nothing is changed: a batch is looked at under a lease that is given back. Only the model's configuration must be there;
a pool or a gateway that does not run yet is reported as missing.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from headrace.engine.device import device_of
from headrace.pool.errors import NotFound, PoolUnreachable
from headrace.trainer.batches import unreachable_reason
from headrace.trainer.checkpoint import Checkpoints
from headrace.trainer.config import TeacherConfig, TrainerConfig
from headrace.trainer.examples import examples_of
from headrace.trainer.lora import Adapter
from headrace.trainer.memory import (
    GIB,
    USABLE,
    MemoryUse,
    ModelShape,
    available_bytes,
    compiles,
    forecast,
    longest,
    offloaded,
)
from headrace.trainer.own_functions import check_functions
from headrace.trainer.policy import load_config
from headrace.trainer.skipped import filter_metrics, skipped_phrases
from headrace.trainer.stopping import Outage, StopSignal
from headrace.trainer.sync.http import ServerFailed, ServerHttp
from headrace.trainer.teacher import Teacher

log = logging.getLogger(__name__)

#: Seconds of the lease under which the first batch is looked at.
PEEK_LEASE_S = 60.0
#: Seconds that a gateway may take to answer: one that is well takes milliseconds.
GATEWAY_TIMEOUT_S = 5.0


def dry_run(config: TrainerConfig) -> str:
    """The whole report as text: one YAML document for each part. Raises `InvalidInput` where the model has no
    configuration, or a function of the user's own does not work."""
    check_functions(config.algorithm)
    parts = {
        "configuration": config.shown(),
        "memory": memory(config),
        "what it would do": plan(config),
        "first batch": first_batch(config),
    }
    return "\n".join(f"# {name}\n{yaml.safe_dump(part, sort_keys=False).rstrip()}" for name, part in parts.items())


def memory(config: TrainerConfig) -> dict[str, Any]:
    """GiB of memory by what they are for, as text: at the peak of a step, with passes of `optimizer.tokens` tokens that
    are all trained on; and the longest sequence that fits."""
    from transformers import AutoModelForCausalLM

    model = load_config(config.model)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model)
        if config.lora is not None:
            Adapter(made, config.lora, config.model)
    shape = ModelShape.of(made)
    device = device_of(config.device)
    compiled = compiles(config, device, shape.parameters)
    allowed = MemoryUse.of(config, device, compiled=compiled, synced=config.sync is not None)
    available, tokens = available_bytes(device), config.optimizer.tokens
    kept = longest(shape, replace(allowed, recompute=False), available)
    recomputed = allowed.recompute and (config.memory.recompute == "layers" or tokens > kept)
    found = forecast(shape, replace(allowed, recompute=recomputed), tokens)
    most = longest(shape, allowed, available)
    report: dict[str, Any] = {
        "parameters": shape.parameters,
        **{name: f"{size / GIB:.2f} GiB" for name, size in found.items()},
        "together": f"{sum(found.values()) / GIB:.2f} GiB on {device}",
        "there is": f"{available / GIB:.2f} GiB, of which {USABLE:.0%} are filled at most",
        "layers are": ("recomputed" if recomputed else "kept") + (" and compiled" if compiled else ""),
        "longest sequence that fits": f"{most:,} tokens" if most else "none: the model does not",
    }
    if allowed.offload:
        report["in the CPU's memory"] = f"{offloaded(shape, allowed) / GIB:.2f} GiB"
    if config.memory.recompute == "auto":
        report["layers are recomputed"] = f"in passes of more than {kept:,} tokens"
    return report


def plan(config: TrainerConfig) -> dict[str, Any]:
    """What the run would do, in words, and whether the gateway it needs answers."""
    pool, cut, rule, kept = config.pool, config.optimizer, config.algorithm, config.checkpoint
    updates, rate = cut.epochs * cut.minibatches, config.learning_rate
    latest = Checkpoints(config.run, config.model, kept.keep).latest
    found = {
        "run": f"{config.run}, " + ("a new one" if latest is None else f"from step {int(latest.name)}, with --resume"),
        "each step": f"{pool.batch_size} groups from channel {pool.channel} of the pool {pool.address}",
        "learning": f"{rule.advantage} advantages, {rule.loss} loss, {updates} updates a step at {rate:g}",
        "weights": "are published nowhere: sync is not set",
        "checkpoints": f"every {kept.every} steps, the last {kept.keep} of them are kept",
        "ends": f"after {config.steps} steps",
    }
    if config.stop_at_reward is not None:
        found["ends"] += f", or once the reward of {config.stop_window} steps is {config.stop_at_reward:g}"
    if rule.filters:
        found["filters"] = ", ".join(one.name for one in rule.filters)
    if rule.teacher is not None and rule.teacher.address is not None:
        found["teacher"] = _teacher(rule.teacher, config.model)
    if config.sync is not None:
        servers = ", ".join(config.sync.servers)
        to = f"the gateway {config.sync.gateway}" if config.sync.gateway is not None else f"the servers {servers}"
        found["weights"] = f"go to {to} after each step"
        if config.sync.gateway is not None:
            found["gateway"] = _gateway(config.sync.gateway, config.sync.presented_key)
    return found


def _teacher(asked: TeacherConfig, model: Path) -> str:
    why = Teacher(asked, model, Outage("the teacher", log.warning), StopSignal()).check()
    return f"{asked.address} " + (f"does not answer: {why} (the run would wait for it)" if why else "answers")


def _gateway(address: str, key: str | None) -> str:
    try:
        ServerHttp(address, key=key, timeout_s=GATEWAY_TIMEOUT_S).get("/ready")
    except ServerFailed as error:
        return f"is not ready: {error.reason} (the run would wait for it)"
    return "is ready"


def first_batch(config: TrainerConfig) -> dict[str, Any]:
    """The shape of the batch that the pool would hand out; where there is none, the reason."""
    wanted = config.pool
    try:
        pool = wanted.connected(retry_s=0.0)
        info = pool.desk_info()
        if info.serving == wanted.channel and not info.started:
            return {"groups": f"not looked at: environments feed {wanted.channel!r}, and begin when the run does"}
        batch = pool.fetch_batch(
            wanted.batch_size, n_rollouts=wanted.n_rollouts, channel=wanted.channel, lease_s=PEEK_LEASE_S, timeout=0
        )
    except (PoolUnreachable, NotFound) as error:
        return {"groups": f"not looked at: the pool {wanted.address} does not answer: {unreachable_reason(error)}"}
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
            "skipped": skipped_phrases({**found.skipped.metrics(), **filter_metrics(found.filtered)}),
        }
    finally:
        batch.nack()
