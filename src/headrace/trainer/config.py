"""The trainer's configuration: what `headrace train CONFIG.yaml` reads.

A configuration that cannot work fails when it is read, before a model is loaded, and the error names the field and a
value that would work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.data.errors import shown
from headrace.data.keys import configured_key
from headrace.files import Key, checked, expanded, nearest, read
from headrace.net.http_answer import split_address
from headrace.pool import KEY_VARIABLE
from headrace.pool.connect import connect
from headrace.pool.remote import RemotePool
from headrace.trainer.sync.config import SyncConfig

Aggregation = Literal["token", "sequence", "step", "constant"]
#: What ships, by the names in a configuration; the functions are in `losses`, `advantages` and `filters`.
LOSSES = ("ppo", "tis", "gspo", "cispo", "sft")
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce", "gae", "none")
FILTERS = ("accuracy", "min_reward", "overlong")
#: How far a ratio may be below and above 1 where nothing is set, by the loss: what is usual for each. The ratio of a
#: sequence, a geometric mean over its tokens, moves far less than a token's; a weight in CISPO has no lower bound.
CLIPS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
#: Losses that lose their gradient where a ratio leaves the clip: not for replays, whose recorded log-probs are far off.
CLIPPED_LOSSES = ("ppo", "gspo")


#: Adapters learn best at some ten times the rate of all weights: their product begins at 0, and only half of it moves
#: at first.
LORA_LR_FACTOR = 10


class Section(BaseModel):
    """A part of the configuration. Frozen; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolConfig(Section):
    """The pool that batches come from, and how they are taken."""

    address: str = Field("http://127.0.0.1:8100", description="a gateway or pool, or ray-actor://NAME?namespace=...")
    key: Key = Field(None, description=f"its key; default: {KEY_VARIABLE}")
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
        return connect(self.address, key=configured_key(self.key, KEY_VARIABLE), retry_s=retry_s)


class FilterConfig(Section):
    """One filter: its name or `FILE.py:FUNCTION`, and beside it the function's options, by their names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @field_validator("use")
    @classmethod
    def _is_one(cls, value: str) -> str:
        return _function(value, FILTERS, "filter")

    @property
    def options(self) -> dict[str, Any]:
        """What the function is called with besides the group."""
        return dict(self.model_extra or {})

    @property
    def name(self) -> str:
        """What the metrics call it: `filtered_NAME`."""
        return self.use.rpartition(":")[2]


class OverlongConfig(Section):
    """DAPO's soft punishment of long answers: none up to `max_tokens - buffer` sampled tokens of a trajectory, from
    there on one that grows evenly to `penalty` at `max_tokens`."""

    max_tokens: int = Field(ge=1, description="sampled tokens of a trajectory from which on the penalty is whole")
    buffer: int = Field(ge=1, description="tokens before that over which it grows")
    penalty: float = Field(1.0, gt=0, description="taken off the reward before trajectories are compared")

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer is {self.buffer}: it lies within max_tokens, so at most {self.max_tokens}")
        return self


class TeacherConfig(Section):
    """A model that a policy is distilled from: a server with vLLM's `/v1/completions`, or what groups bring."""

    address: str | None = Field(
        None, description="of a server with vLLM's /v1/completions; without it groups must bring ref_logprobs"
    )
    model: str | None = Field(None, description="its name there; default: the first that the server names")
    key: Key = Field(None, description="the server's key")
    weight: float = Field(1.0, gt=0, description="of the teacher's log-prob less the sampled one in an advantage")
    concurrency: int = Field(8, ge=1, description="sequences that are asked about at once")
    timeout_s: float = Field(120.0, gt=0, description="how long one answer may take")
    patience_s: float = Field(300.0, gt=0, description="how long a teacher that does not answer is waited for")

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


class AlgorithmConfig(Section):
    """Advantages, loss, filters, KL and entropy terms, a teacher."""

    advantage: str = Field("grpo", description=f"{', '.join(ADVANTAGES)}, or FILE.py:FUNCTION")
    advantage_options: dict[str, Any] = Field({}, description="keyword arguments of an advantage of your own")
    gamma: float = Field(1.0, ge=0, le=1, description="gae: discount a token")
    lam: float = Field(0.95, ge=0, le=1, description="gae: lambda")
    process_rewards: bool = Field(
        True, description="a step's reward counts for it and those before it; false: for all of its trajectory"
    )
    overlong: OverlongConfig | None = Field(None, description="a penalty for long answers")
    skip_zero_variance: bool = Field(True, description="leave out groups whose rewards are all equal")
    filters: tuple[FilterConfig, ...] = Field(
        (), description=f"what is learned from: {', '.join(FILTERS)}, or FILE.py:FUNCTION"
    )
    loss: str = Field("ppo", description=f"{', '.join(LOSSES)}, or FILE.py:FUNCTION")
    loss_options: dict[str, Any] = Field({}, description="keyword arguments of a loss of your own")
    old: Literal["rollout", "proximal"] = Field(
        "rollout", description="ratios against the recorded log-probs, or against the weights before this batch"
    )
    clip: float | None = Field(
        None, gt=0, le=1, description="how far a ratio may fall below 1; default: 0.2, gspo 0.0003, cispo 1 (no bound)"
    )
    clip_high: float | None = Field(
        None, gt=0, description="how far it may rise above 1; default: clip, where that is set, or 0.2, 0.0004, 4"
    )
    cap: float = Field(2.0, gt=0, description="most that an importance weight counts (tis, or with old: proximal)")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0: no reference is loaded")
    kl_estimator: Literal["k2", "k3"] = "k3"
    reference: Path | None = Field(None, description="the reference's checkpoint; default: where training began")
    entropy: float = Field(0.0, ge=0, description="weight of an entropy bonus")
    distill: float = Field(
        1.0, ge=0, description="weight of the distance to a teacher, where groups bring one's log-probs (distill_*)"
    )
    teacher: TeacherConfig | None = Field(None, description="whose log-probs of sampled tokens are advantages")
    aggregation: Aggregation | None = Field(None, description="default: token; sequence for gspo; constant for dr_grpo")
    constant_length: int = Field(1024, ge=1, description="aggregation constant: what a sequence's sum is divided by")
    mask_truncated: bool = Field(False, description="answers that ended by their length are context, not targets")

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, value: str) -> str:
        return _function(value, ADVANTAGES, "advantage")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        return _function(value, LOSSES, "loss")

    @property
    def has_own_functions(self) -> bool:
        """Whether a loss, an advantage or a filter is a user's, `FILE.py:FUNCTION`."""
        return any(":" in name for name in (self.loss, self.advantage, *(one.use for one in self.filters)))

    @property
    def weighting(self) -> Aggregation:
        """The aggregation in force: the one that is set, else that of the loss or the advantage."""
        if self.aggregation is not None:
            return self.aggregation
        return "sequence" if self.loss == "gspo" else "constant" if self.advantage == "dr_grpo" else "token"

    @property
    def clips(self) -> tuple[float, float]:
        """How far a ratio may be below and above 1: what is set, else what is usual for the loss."""
        low, high = CLIPS.get(self.loss, CLIPS["ppo"])
        return self.clip or low, self.clip_high or self.clip or high

    @property
    def needs_rewards(self) -> bool:
        """Whether a trajectory without a reward cannot be learned from."""
        return self.loss != "sft" and self.advantage != "none"

    @property
    def skips_equal(self) -> bool:
        """Whether trajectories whose advantages are all 0 have nothing to teach, and are left out."""
        return self.skip_zero_variance and self.needs_rewards and self.advantage != "gae" and self.teacher is None

    @model_validator(mode="after")
    def _fits(self) -> AlgorithmConfig:
        if self.loss == "sft":
            without = {
                "advantage: gae": self.advantage == "gae",
                "teacher": self.teacher is not None,
                "overlong": self.overlong is not None,
                "old: proximal": self.old == "proximal",
            }
            for name in (name for name, is_set in without.items() if is_set):
                raise ValueError(f"loss: sft uses neither advantages nor ratios: leave out {name}, or use loss: ppo")
        if self.advantage == "none" and self.overlong is not None:
            raise ValueError("advantage: none compares no rewards: leave out overlong, or name another advantage")
        if self.teacher is not None and self.advantage == "gae":
            raise ValueError("a critic knows no teacher: use advantage: none, or another than gae, with a teacher")
        if self.teacher is not None and self.kl:
            raise ValueError("teacher and kl both are a distance to ref_logprobs: set kl: 0, or leave out the teacher")
        for name, used, options in (
            ("loss", self.loss, self.loss_options),
            ("advantage", self.advantage, self.advantage_options),
        ):
            if options and ":" not in used:
                raise ValueError(f"{name}_options are for a function of your own, and {name} is {used}: leave them out")
        return self


def _function(value: str, known: tuple[str, ...], what: str) -> str:
    """A shipped function's name, or `FILE.py:FUNCTION`, as it is. Raises `ValueError` where it is neither."""
    where, colon, name = value.rpartition(":")
    if value in known or (colon and where and name.isidentifier()):
        return value
    raise ValueError(
        f"{shown(value)} is no {what}{nearest(value, known)}; it is one of {', '.join(known)}, or FILE.py:FUNCTION"
    )


def with_files_below(algorithm: Any, base: Path) -> Any:
    """The values of an `algorithm` section, with the files of functions by their whole paths: relative ones are below
    `base`. What is wrong stays as it is, for `AlgorithmConfig` to say so."""
    if not isinstance(algorithm, Mapping):
        return algorithm

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {**value, "use": whole(value["use"])} if "use" in value else value
        if not isinstance(value, str):
            return value
        where, _, name = value.rpartition(":")
        return f"{(base / expanded(where)).resolve()}:{name}" if where.endswith(".py") else value

    found = {**algorithm, **{name: whole(algorithm[name]) for name in ("loss", "advantage") if name in algorithm}}
    if isinstance(found.get("filters"), list | tuple):
        found["filters"] = [whole(one) for one in found["filters"]]
    return found


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
    share_prefixes: bool = Field(True, description="compute tokens that sequences of a pass begin with once")


class MemoryConfig(Section):
    """What is kept in the device's memory, and what is computed again or kept elsewhere to save it."""

    recompute: Literal["none", "layers", "auto"] = Field(
        "auto", description="compute layers again in the backward pass; auto: in passes that do not fit otherwise"
    )
    weights: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the model, with float32 masters in the optimizer; auto: as dtype"
    )
    offload: Literal["none", "optimizer"] = Field(
        "none", description="optimizer: masters and AdamW's averages are in the CPU's memory and updated there"
    )


class LoraConfig(Section):
    """Low-rank adapters: the model's weights stay as they are, and two thin matrices beside each targeted layer are
    trained. `scale` is what their product is multiplied by."""

    rank: int = Field(16, ge=1, description="width of the adapters")
    alpha: int | None = Field(None, ge=1, description="their product counts alpha / rank times; default: 2 x rank")
    targets: list[str] | str | None = Field(
        None, description="linear layers: names (q_proj, ...) or one regex of whole names; default: all of the decoder"
    )
    lr: float | None = Field(None, gt=0, description="in place of optimizer.lr; default: 10 times that")
    init: Literal["kaiming", "gaussian"] = Field("kaiming", description="of the first matrix; the second begins as 0")
    dropout: float = Field(0.0, description="0: a server samples without it, so log-probs would differ")

    @property
    def scaled_alpha(self) -> int:
        """The alpha in force."""
        return self.alpha or 2 * self.rank

    @property
    def scale(self) -> float:
        return self.scaled_alpha / self.rank

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, given: float) -> float:
        if given:
            raise ValueError(f"is {given:g} and must be 0: the servers sample without dropout, so ratios would be off")
        return given

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, given: list[str] | str | None) -> list[str] | str | None:
        if given is not None and (not given or not all(given)):
            raise ValueError("is empty; leave it out for all linear layers, or name some: [q_proj, v_proj]")
        if isinstance(given, str):
            try:
                re.compile(given)
            except re.error as error:
                raise ValueError(f"{given!r} is no regular expression: {error}") from None
        return given


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
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the computation")
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile of the layers; auto: with bfloat16 on a GPU, for models and passes it pays for",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads")
    max_length: int | None = Field(None, ge=2, description="longer sequences are skipped and counted, never cut")
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    memory: MemoryConfig = MemoryConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig | None = Field(None, description="train adapters beside the weights; default: the weights")
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def learning_rate(self) -> float:
        """The policy's learning rate before its schedule: the adapters' where there are some."""
        if self.lora is None:
            return self.optimizer.lr
        return self.lora.lr or LORA_LR_FACTOR * self.optimizer.lr

    @model_validator(mode="after")
    def _computes(self) -> Self:
        if self.memory.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ValueError(f"memory.weights is bfloat16 and dtype is {self.dtype}: set dtype: bfloat16 too")
        return self


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
        loss = self.algorithm.loss
        if self.pool.order == "mixed" and self.algorithm.old == "rollout" and loss in CLIPPED_LOSSES:
            raise ValueError(f"order: mixed replays old groups: use loss: tis, or old: proximal with loss: {loss}")
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
    """Reads a YAML or JSON file; `changes` replace top-level fields. Files of functions are below the file's folder.
    Raises `InvalidInput`, which names each wrong field."""
    values = {**read(path), **changes}
    if "algorithm" in values:
        values["algorithm"] = with_files_below(values["algorithm"], path.absolute().parent)
    return checked(TrainerConfig, values, path)
