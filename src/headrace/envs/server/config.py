"""How environments reach their rollout servers: `APIServerConfig` for one, `ServerBaseline` for those of a node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace.data.errors import InvalidInput

ServerType = Literal["openai", "vllm", "sglang", "trl", "gateway"]

#: Where a node's servers listen when nothing else is said: one a GPU, the first four being the trainer's.
LOCAL_PORTS = range(9004, 9008)
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

    api_key: str | None = Field(default="", description="Sent as a bearer token where it is not empty.")
    base_url: str | None = Field(default="", description="Its address up to the version: http://host:port/v1.")
    n_kwarg_is_ignored: bool = Field(default=False, description="Ask n times for one answer: the server ignores n.")
    health_check: bool = Field(default=True, description="Pass the server over while it is down, and look for it.")
    weight: float = Field(default=1.0, gt=0, description="Its share of the requests, against that of the others.")
    channel: str = Field(
        default="envs",
        description="Behind a gateway: where steps are kept. Not the trainer's: it has the scored group.",
    )


OpenaiConfig = APIServerConfig


class ServerManagerConfig(BaseModel):
    """What the command line says of the servers as a whole."""

    model_config = ConfigDict(extra="forbid")

    slurm: bool = Field(default=False, description="Find the servers by the nodes of the Slurm job.")
    testing: bool = Field(default=False, description="Answer from a harness, without a server.")
    max_n_completions: int = Field(default=8, ge=1, description="Largest n of one request; more are several requests.")


def server_configs(
    configs: ServerBaseline | Sequence[APIServerConfig], *, slurm: bool = False
) -> list[APIServerConfig]:
    """One configuration a server: those given, or a node's, or a Slurm job's, made after the first one given."""
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
    """The servers on the nodes of this Slurm job that do not train; none outside of one, or on a single node."""
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
