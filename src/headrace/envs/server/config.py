"""Configuration of rollout servers: `APIServerConfig` for one, `ServerBaseline` for those of a node, `ReasoningConfig`
for how much a model reasons before it answers, in the request fields of its provider.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.data.errors import InvalidInput
from headrace.files import Key

ServerType = Literal["openai", "vllm", "sglang", "trl", "gateway"]

#: Ports of a node's servers where none are configured: one per GPU, the first four GPUs being the trainer's.
LOCAL_PORTS = range(9004, 9008)
#: A Slurm node's servers: one for every INFER_TP GPUs, from this port on.
NODE_GPUS = 8
NODE_FIRST_PORT = 9000


class ServerBaseline(BaseModel):
    """What all rollout servers of an environment have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    timeout: int = Field(default=1200, gt=0, description="Seconds that one request may take.")
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Most requests in flight on one server; divide it by n where you ask for n > 1."
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Most evaluation requests in flight on one server."
    )
    model_name: str = Field(default="default", description="The name under which the servers serve the model.")
    rolling_buffer_length: int = Field(default=1000, ge=1, description="How many requests the statistics look back on.")
    server_type: ServerType = Field(default="openai", description="What the servers speak.")
    tokenizer_name: str = Field(default="none", description="The tokenizer; `none` takes that of model_name.")
    max_attempts: int = Field(default=3, ge=1, description="How often a request is tried before its error is raised.")
    retry_s: float = Field(default=1.0, ge=0, description="Seconds before the first retry on the same server; doubles.")
    probe_s: float = Field(default=1.0, ge=0, description="Seconds between two questions whether a server is back.")


class APIServerConfig(ServerBaseline):
    """One rollout server."""

    api_key: Key = Field(
        default="",
        description="Sent as a bearer token. Empty: none; to a gateway HEADRACE_ADMIN_KEY, else HEADRACE_API_KEY.",
    )
    base_url: str | None = Field(default="", description="Its address up to the version: http://host:port/v1.")
    n_kwarg_is_ignored: bool = Field(default=False, description="Ask n times for one answer: the server ignores n.")
    health_check: bool = Field(default=True, description="Pass the server over while it is down, and look for it.")
    weight: float = Field(default=1.0, gt=0, description="Its share of the requests, against that of the others.")
    channel: str = Field(
        default="envs",
        description="Behind a gateway: where steps are kept. Not the trainer's: it has the scored group.",
    )
    record: bool = Field(
        default=True,
        description="Behind a gateway: whether calls are kept as steps; without, the scored group alone is kept.",
    )


OpenaiConfig = APIServerConfig


class ServerManagerConfig(BaseModel):
    """Options of the command line that hold for all servers."""

    model_config = ConfigDict(extra="forbid")

    slurm: bool = Field(default=False, description="Find the servers by the nodes of the Slurm job.")
    testing: bool = Field(default=False, description="Answer from a harness, without a server.")
    max_n_completions: int = Field(default=8, ge=1, description="Largest n of one request; more are several requests.")


def server_configs(
    configs: ServerBaseline | Sequence[APIServerConfig], *, slurm: bool = False
) -> list[APIServerConfig]:
    """One configuration per server: those given, or copies of the baseline for a node's or a Slurm job's servers.

    Raises `InvalidInput` for a Slurm job of several nodes without NUM_TRAINING_NODES.
    """
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    if isinstance(configs, ServerBaseline):
        model = APIServerConfig(**configs.model_dump(), api_key="x")
        urls = _slurm_urls() or [f"http://localhost:{port}/v1" for port in LOCAL_PORTS]
        return [model.model_copy(update={"base_url": url}) for url in urls]
    if configs and slurm and (urls := _slurm_urls()):
        return [configs[0].model_copy(update={"base_url": url}) for url in urls]
    return list(configs)


def _slurm_urls() -> list[str]:
    """Addresses of the servers on this Slurm job's nodes that do not train; empty outside of Slurm or on one node."""
    job = os.environ.get("SLURM_JOB_NODELIST")
    if not job:
        return []
    found = subprocess.run(["scontrol", "show", "hostnames", job], capture_output=True, text=True, check=True)
    nodes = found.stdout.split()
    if len(nodes) < 2:
        return []
    training = os.environ.get("NUM_TRAINING_NODES", "")
    if not training.isdecimal():
        raise InvalidInput(
            f"NUM_TRAINING_NODES is {training!r}; a Slurm job of {len(nodes)} nodes must say how many train"
        )
    ports = range(NODE_FIRST_PORT, NODE_FIRST_PORT + NODE_GPUS // int(os.environ.get("INFER_TP", "1")))
    return [f"http://{node}:{port}/v1" for node in nodes[int(training) :] for port in ports]


VALID_REASONING_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh"}
OFFICIAL = "api.openai.com"


@dataclass
class ReasoningConfig:
    """How much a model should reason. `enabled` is true where an effort or a number of tokens is given."""

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    #: Tokens that stand for an effort at providers which take only a number.
    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            known = ", ".join(self.EFFORT_TO_MAX_TOKENS)
            raise InvalidInput(f"reasoning_effort is {self.effort!r}; it must be one of {known}")
        self.enabled = self.enabled or self.effort is not None or self.max_tokens is not None

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """The reasoning that an environment's configuration asks for."""
        return cls(
            enabled=getattr(env_config, "thinking_mode", False),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        """Whether requests ask for reasoning."""
        return self.enabled

    def build_extra_body(self, base_url: str | None = None, use_max_tokens: bool = False) -> dict[str, Any] | None:
        """Fields that ask for reasoning; None where it is off. An effort wins over a number of tokens."""
        if not self.enabled:
            return None
        if is_official(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        if self.effort is not None:
            most = self.EFFORT_TO_MAX_TOKENS[self.effort]
            return {
                "reasoning": {"enabled": True, **({"max_tokens": most} if use_max_tokens else {"effort": self.effort})}
            }
        if self.max_tokens is not None:
            return {"reasoning": {"enabled": True, "max_tokens": self.max_tokens}}
        return {"reasoning": {"enabled": True}}

    def injected(self, kwargs: dict[str, Any], base_url: str | None) -> dict[str, Any]:
        """The chat request with those fields added. OpenAI's own models then accept temperature 1 only."""

        asked = self.build_extra_body(base_url)
        if asked is None:
            return kwargs
        kwargs = {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), **asked}}
        if is_official(base_url):
            kwargs["temperature"] = 1.0
            if kwargs.get("max_tokens"):
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs


def is_official(base_url: str | None) -> bool:
    """Whether an address is OpenAI's own."""
    return bool(base_url) and OFFICIAL in str(base_url)
