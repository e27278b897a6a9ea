"""The trainer's configuration: what `headrace train CONFIG.yaml` reads.

A configuration that cannot work fails when it is read, before a model is loaded, and the error names the field and a
value that would work.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.files import checked, read
from headrace.pool import KEY_VARIABLE
from headrace.pool.connect import connect
from headrace.pool.remote import RemotePool
from headrace.trainer.sync.config import SyncConfig

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce", "gae"]
Loss = Literal["ppo", "tis"]
Aggregation = Literal["token", "sequence", "step", "constant"]


class Section(BaseModel):
    """A part of the configuration. Frozen; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolConfig(Section):
    """The pool that batches come from, and how they are taken."""

    address: str = Field("http://127.0.0.1:8100", description="a gateway or pool, or ray-actor://NAME?namespace=...")
    key: str | None = Field(None, description=f"its key; default: {KEY_VARIABLE}")
    channel: str = "train"
    batch_size: int = Field(32, ge=1, description="groups a step")
    n_rollouts: int | None = Field(None, ge=1, description="trajectories that make a group; default: the group's own")
    order: Literal["fifo", "latest", "mixed"] = "fifo"
    max_staleness: int | None = Field(None, ge=0, description="groups further behind the policy are dropped")
    lease_s: float = Field(300.0, gt=0, description="how long a batch is ours without news; prolonged while it is used")
    prefetch: bool = Field(True, description="fetch the next batch while this one is learned from")
    patience_s: float = Field(300.0, gt=0, description="how long a pool that does not answer is waited for")

    def connected(self, *, retry_s: float = 30.0) -> RemotePool:
        """A client of the pool; `retry_s` is how long it tries again by itself where the pool does not answer."""
        return connect(self.address, key=self.key or os.environ.get(KEY_VARIABLE), retry_s=retry_s)


class AlgorithmConfig(Section):
    """Advantages, loss, KL and entropy terms."""

    advantage: Advantage = "grpo"
    gamma: float = Field(1.0, ge=0, le=1, description="gae: discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="gae: lambda")
    process_rewards: bool = Field(
        True, description="a step's reward counts for it and those before it; false: for all of its trajectory"
    )
    skip_zero_variance: bool = Field(True, description="leave out groups whose rewards are all equal")
    loss: Loss = "ppo"
    old: Literal["rollout", "proximal"] = Field(
        "rollout", description="ratios against the recorded log-probs, or against the weights before this batch"
    )
    clip: float = Field(0.2, gt=0, lt=1)
    clip_high: float | None = Field(None, gt=0, description="ppo: upper clip, where it differs")
    cap: float = Field(2.0, gt=0, description="most that an importance weight counts (tis, or ppo with old: proximal)")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0: no reference is loaded")
    kl_estimator: Literal["k2", "k3"] = "k3"
    reference: Path | None = Field(None, description="the reference's checkpoint; default: where training began")
    entropy: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    distill: float = Field(
        1.0, ge=0, description="weight of the distance to a teacher, where groups bring one's log-probs (distill_*)"
    )
    aggregation: Aggregation | None = Field(None, description="default: token; constant for dr_grpo")
    constant_length: int = Field(1024, ge=1, description="aggregation constant: what a sequence's sum is divided by")
    mask_truncated: bool = Field(False, description="answers that ended by their length are context, not targets")

    @property
    def weighting(self) -> Aggregation:
        """The aggregation in force: the one that is set, else that of the advantage."""
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")


class OptimizerConfig(Section):
    """AdamW, its schedule, and how a batch is split into updates and forward passes."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="down to 0 at the last step")
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: int = Field(1, ge=1, description="times that a batch is gone through")
    minibatches: int = Field(1, ge=1, description="optimizer updates an epoch")
    tokens: int = Field(16384, ge=16, description="tokens of one forward pass; the rest accumulates")


class CriticConfig(Section):
    """The value model of `advantage: gae`: the policy's architecture with a head of one number."""

    lr: float = Field(1e-5, gt=0)
    clip: float = Field(0.2, gt=0, description="how far a value may move in one batch")
    warmup_steps: int = Field(0, ge=0, description="steps in which only the critic learns")


class ValidationConfig(Section):
    """Groups of a channel that are evaluated and never learned from."""

    every: int = Field(0, ge=0, description="steps between; 0: never")
    channel: str = "val"
    groups: int = Field(64, ge=1, description="most groups that one validation takes")
    timeout_s: float = Field(0.0, ge=0, description="how long it waits for the first of them")


class CheckpointConfig(Section):
    """How often a checkpoint is written, and how many are kept."""

    every: int = Field(10, ge=1, description="steps between; batches are acknowledged once their step is in one")
    keep: int = Field(2, ge=1)


class LogConfig(Section):
    """Where metrics go besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    wandb: str | None = Field(None, description="a project's name")


class LearningConfig(Section):
    """How is learned, wherever batches come from and weights go: for how long, on what, and by which algorithm."""

    steps: int = Field(1000, ge=1, description="most steps")
    stop_at_reward: float | None = Field(None, description="stop once the mean reward of stop_window steps is there")
    stop_window: int = Field(10, ge=1)
    seed: int = 0
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: a GPU where there is one")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the computation; weights are float32")
    threads: int | None = Field(None, ge=1, description="CPU threads")
    max_length: int | None = Field(None, ge=2, description="longer sequences are skipped and counted, never cut")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class TrainWorkers(Section):
    """Workers of a Ray cluster that train together: how many, and what Ray sets aside for each."""

    workers: int = Field(ge=1, le=4096, description="processes, each with a part of the model")
    gpus: float = Field(0, ge=0, description="GPUs for each; 0: it computes on CPUs")
    num_cpus: float = Field(1, ge=0, description="CPUs for each")
    resources: dict[str, float] = Field({}, description="what else a node must have, such as {learning: 1}")
    here: bool = Field(False, description="on this machine's node alone")
    max_failures: int = Field(3, ge=-1, description="times that all are begun again where one dies; -1: always")

    def flags(self) -> list[str]:
        """The same as flags of `headrace train`."""
        found = ["--workers", str(self.workers), "--gpus-per-worker", f"{self.gpus:g}"]
        found += ["--cpus-per-worker", f"{self.num_cpus:g}", "--max-failures", str(self.max_failures)]
        for name, amount in self.resources.items():
            found += ["--resource", f"{name}={amount:g}"]
        return [*found, *(["--here"] if self.here else [])]


class TrainerConfig(LearningConfig):
    """All of a run's configuration, as `headrace train CONFIG.yaml` reads it."""

    model: Path = Field(description="the checkpoint to begin with: a folder as transformers writes it, or a hub name")
    run: Path = Field(description="the folder of this run: checkpoints, metrics.jsonl")
    version_each_step: bool = Field(
        False, description="a step that learned nothing is a version too: for a rollouter, which admits by versions"
    )
    score_unrewarded: bool = Field(False, description="ask the gateway's /compute_reward for rewards that are missing")
    pool: PoolConfig = PoolConfig()
    sync: SyncConfig | None = Field(None, description="where weights go; without it nothing is published")
    validation: ValidationConfig = ValidationConfig()

    def shown(self) -> dict[str, Any]:
        """Every field as JSON for logs, the model and the run's folder first; keys are replaced by `***`."""
        found = _without_keys(self.model_dump(mode="json"))
        return {"model": found.pop("model"), "run": found.pop("run"), **found}

    @model_validator(mode="after")
    def _fits(self) -> TrainerConfig:
        if self.score_unrewarded and (self.sync is None or self.sync.gateway is None):
            raise ValueError("score_unrewarded asks the gateway's /compute_reward: set sync.gateway")
        if self.pool.order == "mixed" and self.algorithm.old == "rollout" and self.algorithm.loss == "ppo":
            raise ValueError("order: mixed replays old groups: use loss: tis, or old: proximal with loss: ppo")
        if self.validation.every and self.validation.channel == self.pool.channel:
            raise ValueError(f"validation.channel is {self.pool.channel!r}, which is trained on; name another")
        return self


def _without_keys(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _without_keys(value)
        else:
            found[name] = "***" if value and (name == "key" or name.endswith("_key")) else value
    return found


def load(path: Path, **changes: Any) -> TrainerConfig:
    """Reads a YAML or JSON file; `changes` replace top-level fields. Raises `InvalidInput`, which names each wrong
    field."""
    return checked(TrainerConfig, {**read(path), **changes}, path)
