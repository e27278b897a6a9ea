"""What `headrace run run.yaml` reads: a model, where it is served, data, an agent, a reward and how to train.

Paths in the file are below the folder of the file. A file that cannot work is refused when it is read, and the error
names the field and a value that would work; what only a look at this machine can tell (a path, an import, a port) is
`headrace.run.checks`'s.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from headrace.data.errors import InvalidInput
from headrace.files import checked, expanded, local_model_folder, read
from headrace.flows.config import AgentConfig, DataConfig
from headrace.rewards.config import RewardConfig
from headrace.run.cluster import RayPlace
from headrace.run.services import HOST
from headrace.trainer.config import LearningConfig, Section, with_files_below

#: The channels of a run's pool: what is learned from, and what is only scored.
TRAIN, VAL = "train", "val"
#: What the start of a rollout server may name; they are put in for each server.
MODEL_MARK, PORT_MARK = "{model}", "{port}"


class ServersConfig(Section):
    """The rollout servers: a command that is started so many times, or those that run already."""

    start: str | None = Field(
        None, description="a command: headrace engine, vllm serve, or any with {model} and {port} (default: the first)"
    )
    count: int = Field(1, ge=1, le=64, description="how many of them are started")
    addresses: list[str] = Field([], description="servers that run already, as http://127.0.0.1:8001")

    @field_validator("start")
    @classmethod
    def _words(cls, given: str | None) -> str | None:
        if given is None:
            return None
        words = shlex.split(given)
        if words[:2] in (["headrace", "engine"], ["vllm", "serve"]):
            return given
        if PORT_MARK not in given or MODEL_MARK not in given:
            raise ValueError(
                f"{given!r} should be headrace engine ..., vllm serve ..., or a command with {MODEL_MARK} and "
                f"{PORT_MARK} where the model's folder and the port belong"
            )
        return given

    @field_validator("addresses")
    @classmethod
    def _http(cls, given: list[str]) -> list[str]:
        for address in given:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; it looks like http://127.0.0.1:8001")
        return [address.rstrip("/").removesuffix("/v1") for address in given]

    @model_validator(mode="after")
    def _either(self) -> ServersConfig:
        if self.addresses and self.start is not None:
            raise ValueError("start names servers to start and addresses those that run already; give one of them")
        return self

    @property
    def command(self) -> str | None:
        """What is started; None where the servers run already."""
        return None if self.addresses else self.start or "headrace engine"

    @property
    def started(self) -> int:
        """How many are started."""
        return 0 if self.addresses else self.count


class GatewaySection(Section):
    """The gateway of the run: where it listens, and bounds of a call."""

    port: int = Field(0, ge=0, le=65535, description="0: a free one")
    prompt_length: int | None = Field(None, ge=1, description="longest prompt in tokens; default: the model's")
    response_length: int | None = Field(None, ge=1, description="cap of max_tokens; default: what the context leaves")
    durability: Literal["os", "fsync"] = Field(
        "os", description="what the pool's journal outlives: the processes (os) or the machine (fsync)"
    )
    pool_memory_mb: float | None = Field(
        None, ge=0, description="steps' arrays that the pool keeps in memory, the others in its journal; default: 1024"
    )


class PlaySection(Section):
    """How rollouts are played."""

    concurrency: int = Field(64, ge=1, description="rollouts at once")
    max_staleness: int = Field(1, ge=0, description="most versions that what is learned from may be behind")
    retries: int = Field(2, ge=0, description="times that a rollout which failed is played again")
    group_timeout_s: float | None = Field(
        None, gt=0, description="an incomplete group without news for so long is dropped; default: it is waited for"
    )


class SyncSection(Section):
    """How weights reach the rollout servers; the gateway says where they are."""

    mode: Literal["auto", "keep", "drain", "abort-resume"] = "auto"
    via: Literal["auto", "cuda_ipc", "shared_memory", "files"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field("auto", description="what weights travel in")
    lora: Literal["auto", "adapter", "merged"] = Field("auto", description="LoRA: the adapter alone, or all weights")
    verify: bool = Field(True, description="compare each server's log-probs with the trainer's before it samples")
    tolerance: float | None = Field(
        None, gt=0, description="largest gap of a log-prob; default: what rounding explains"
    )
    timeout_s: float = Field(300.0, gt=0, description="longest wait for one answer of a server")


class TrainSection(LearningConfig):
    """The trainer's configuration, without what the run knows by itself: addresses and folders."""

    steps: int = Field(100, ge=1, description="most training steps")
    batch_size: int = Field(32, ge=1, description="groups (prompts) of a step")
    sync: SyncSection = SyncSection()


class EvaluationSampling(Section):
    """What every call of an evaluation is sampled with, whatever the agent asks for; what is left out is as in
    training."""

    temperature: float | None = Field(None, ge=0, description="0: the likeliest token, always")
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1, description="of one answer")


class EvaluateSection(Section):
    """How the held-out rows, `data.val`, are played: before and after training, and in between. An environment
    evaluates itself, where `every` is given."""

    every: int = Field(
        0,
        ge=0,
        description="training steps between two of them; 0: before and after alone, and an environment as it likes",
    )
    by: list[str] = Field([], description="columns, or fields of samples, whose values get a mean each")
    pass_reward: float = Field(1.0, description="the reward from which on a rollout counts as passed, for pass@k")
    sampling: EvaluationSampling = EvaluationSampling()


class RunConfig(Section):
    """All of `run.yaml`."""

    model: str = Field(description="the checkpoint to begin with: a folder as transformers writes it, or a hub name")
    servers: ServersConfig = ServersConfig()
    data: DataConfig | None = Field(None, description="rows to train on; an environment has its own")
    agent: AgentConfig = Field(description="who plays: run, command, flow or env")
    reward: RewardConfig | None = Field(None, description="what an answer is worth; default: what the agent says")
    rollout: PlaySection = PlaySection()
    gateway: GatewaySection = GatewaySection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    where: Literal["local"] | RayPlace = "local"

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.agent.env is None and self.data is None:
            raise ValueError("data is missing: name the rows to train on, as in data: {train: train.jsonl}")
        if self.agent.env is not None and self.data is not None:
            raise ValueError("data is given and agent.env too: an environment has its own items; leave data out")
        if self.agent.env is not None and self.reward is not None:
            raise ValueError("reward is given and agent.env too: an environment scores by itself; leave reward out")
        if self.agent.env is not None and self.evaluate.sampling != EvaluationSampling():
            raise ValueError("evaluate.sampling is given and agent.env too: an environment samples as it says itself")
        return self

    @property
    def host(self) -> str:
        """Where the gateway listens: on this machine alone, or where a cluster's nodes reach it."""
        return HOST if self.where == "local" else self.where.reached_at

    @property
    def n_rollouts(self) -> int | None:
        """Rollouts that make a group; None where the environment says it."""
        return None if self.data is None else self.data.n_rollouts


def load(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """Reads a file; `changes` are `key=value` (`train.steps=20`, values as in YAML) that go before what it says. Raises
    `InvalidInput`, which names each wrong field. The model's and the data's paths are absolute afterwards."""
    values = read(path)
    for change in changes:
        _change(values, change)
    return checked(RunConfig, resolved(values, path.absolute().parent), path)


def resolved(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The file's values with the paths of its model, its data and the trainer's functions below `base`, and the home
    folder in that of its environment; what is wrong stays as it is, for the model of the file to say so. Raises
    `InvalidInput` where a model's folder or a home folder is not there."""
    found = dict(values)
    model = found.get("model")
    if isinstance(model, str) and (base / model).is_dir():
        found["model"] = str((base / model).resolve())
    elif isinstance(model, str):
        try:
            local = local_model_folder(model)
        except InvalidInput as error:
            raise InvalidInput(f"model: {error}, and none below {base}") from None
        found["model"] = str(local) if local is not None else model
    data = found.get("data")
    if isinstance(data, dict):
        found["data"] = {
            name: str(base / _from_home(f"data.{name}", value))
            if name in ("train", "val") and isinstance(value, str)
            else value
            for name, value in data.items()
        }
    agent = found.get("agent")
    if isinstance(agent, dict) and isinstance(env := agent.get("env"), str) and env.startswith("~"):
        found["agent"] = {**agent, "env": str(_from_home("agent.env", env))}
    train = found.get("train")
    if isinstance(train, dict) and "algorithm" in train:
        found["train"] = {**train, "algorithm": with_files_below(train["algorithm"], base)}
    return found


def _from_home(field: str, path: str) -> Path:
    """A field's path with the home folder that its `~` means. Raises `InvalidInput`, which names the field, where that
    is not known."""
    try:
        return expanded(path)
    except InvalidInput as error:
        raise InvalidInput(f"{field}: {error}") from None


def _change(values: dict[str, Any], change: str) -> None:
    name, equals, text = change.partition("=")
    if not equals or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput(f"--set {change!r} should be key=value, as in train.steps=20")
    *sections, last = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InvalidInput(f"--set {change!r}: {section} is {inner!r}, which has no fields; set {section} itself")
        values = inner
    try:
        values[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidInput(f"--set {change!r}: {text!r} is no value of YAML: {error}") from None
