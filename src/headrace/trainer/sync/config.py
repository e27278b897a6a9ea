"""How weights reach the rollout servers: `sync` in the trainer's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.data.keys import configured_key
from headrace.files import Key

Mode = Literal["keep", "drain", "abort-resume"]


class SyncConfig(BaseModel):
    """Where the servers are, what happens to calls in flight, and how weights are transferred. A configuration that
    cannot work is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gateway: str | None = Field(None, description="the gateway; it holds calls, and says which servers there are")
    model: str | None = Field(
        None, description="which of the gateway's models is trained, where it has several; default: its default"
    )
    servers: list[str] = Field([], description="rollout servers, where there is no gateway")
    admin_key: Key = Field(None, description="the gateway's (or set HEADRACE_ADMIN_KEY)")
    server_key: Key = Field(None, description="the rollout servers' own (or set HEADRACE_UPSTREAM_KEY)")
    mode: Literal["keep", "drain", "abort-resume", "auto"] = Field(
        "auto", description="what becomes of calls in flight; auto: keep with Headrace's engine, abort-resume with vLLM"
    )
    via: Literal["auto", "cuda_ipc", "shared_memory", "files"] = Field(
        "auto",
        description="auto: CUDA IPC to Headrace's engine on the trainer's GPU, shared memory to one on this machine, "
        "files to all others",
    )
    folder: Path | None = Field(
        None, description="where files go: this trainer's alone, and readable by every server under the same path"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="what weights travel in; auto: what the servers compute in, where all agree"
    )
    lora: Literal["auto", "adapter", "merged"] = Field(
        "auto", description="LoRA: the adapter alone, or all weights with it merged; auto: what each server can take"
    )
    verify: bool = Field(True, description="compare each server's log-probs with the trainer's before it samples")
    tolerance: float | None = Field(
        None, gt=0, description="largest gap of a log-prob; default: what rounding explains"
    )
    timeout_s: float = Field(300.0, gt=0, description="longest wait for one answer: a drain, a load")

    @property
    def presented_key(self) -> str | None:
        """The key that is sent to the gateway: `admin_key`, or that of the environment."""
        return configured_key(self.admin_key, "HEADRACE_ADMIN_KEY")

    @field_validator("gateway")
    @classmethod
    def _address(cls, given: str | None) -> str | None:
        return None if given is None else _checked(given)

    @field_validator("servers")
    @classmethod
    def _addresses(cls, given: list[str]) -> list[str]:
        return [_checked(address) for address in given]

    @model_validator(mode="after")
    def _reachable(self) -> SyncConfig:
        if self.gateway is None and not self.servers:
            raise ValueError("neither gateway nor servers is given; one of them says where weights go")
        if self.gateway is None and self.model is not None:
            raise ValueError(f"model is {self.model!r}, and no gateway is given; leave it out, or name the gateway")
        return self


def _checked(given: str) -> str:
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # a bad port raises by itself
        raise ValueError(f"{given!r} is no address; one looks like http://127.0.0.1:8100")
    return given.rstrip("/").removesuffix("/v1")
