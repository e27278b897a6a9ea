"""The file of `headrace rollout`: `data`, `agent`, `gateway` and `rollout`. Paths in it are below its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.data.keys import configured_key
from headrace.files import Key, checked, read
from headrace.flows.config import AgentConfig, DataConfig
from headrace.flows.gateway_client import GatewayClient
from headrace.flows.rollouter import DRAIN_S, POLL_S
from headrace.flows.schedule_state import FailedGroups, RolloutRules
from headrace.net.ray_placement import Placement

#: `validate_every` where there are only rows to validate with: they are played once.
ONCE = 1 << 40


class GatewaySource(BaseModel):
    """The gateway: one that runs, by its address, or one that the rollouter starts as its child."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = Field(None, description="such as http://127.0.0.1:8100")
    start: dict[str, Any] | None = Field(None, description="the flags of `headrace gateway`, such as vllm_addresses")
    key: Key = Field(None, description="what agents call models with (or set HEADRACE_API_KEY)")
    reward_key: Key = Field(
        None, description="what ends trajectories, and agents are not given (or set HEADRACE_REWARD_KEY)"
    )

    @model_validator(mode="after")
    def _one(self) -> GatewaySource:
        if (self.address is None) == (self.start is None):
            raise ValueError(
                "give either address, of a gateway that runs, or start, with the flags of one to be started"
            )
        if self.start is not None and (self.key or self.reward_key):
            raise ValueError("a gateway that is started has its keys in start: api_key, reward_key")
        return self

    def keys(self) -> tuple[str | None, str | None]:
        """The agents' key and the one that ends trajectories."""
        start = self.start or {}
        key = configured_key(self.key or start.get("api_key"), "HEADRACE_API_KEY")
        return key, configured_key(self.reward_key or start.get("reward_key"), "HEADRACE_REWARD_KEY")

    def client(self, address: str) -> GatewayClient:
        """A client of the gateway, which is at that address. Raises `BadAddress` where that is none."""
        return GatewayClient(address, *self.keys())


class WorkersSection(BaseModel):
    """Actors of a Ray cluster that play the rollouts, in place of the rollouter's process; see `headrace.flows.ray`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ray: str = Field("auto", description="the cluster: auto, HOST:PORT or ray://HOST:10001")
    namespace: str = "default"
    count: int = Field(1, ge=1, le=4096, description="how many of them")
    placement: Placement = Placement()


class RolloutSection(BaseModel):
    """How rollouts are run; see `headrace.flows.schedule_state.RolloutRules`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int = Field(ge=1, description="groups that the trainer learns from in a step")
    concurrency: int = Field(64, ge=1, description="rollouts at once")
    max_staleness: int = Field(1, ge=0, description="versions that a group may be behind when it is learned from")
    retries: int = Field(2, ge=0, description="attempts of a rollout after its first")
    retry_s: float = Field(0.5, ge=0, description="seconds before the first of them, doubled for each further one")
    steps: int | None = Field(
        None, ge=1, description="training steps to supply; default: `epochs` passes over the data"
    )
    epochs: int = Field(1, ge=1, description="passes over the data, where steps are not given")
    validate_every: int = Field(0, ge=0, description="versions between two validations, with the first one on; 0: none")
    failed_groups: FailedGroups = Field(
        "replace",
        description="a group with a rollout that failed for good: another prompt is played in its place, or it counts, "
        "since the channel has on_timeout: partial",
    )
    max_failed_groups: int = Field(20, ge=1, description="groups that fail in a row before all is given up")
    scored: bool = Field(False, description="rewards come later, by a reward loop: a group runs until it has them")
    until_trained: bool = Field(
        False,
        description="end once the trainer has used all groups, and not before: one that the pool drops is replaced",
    )
    state: Path | None = Field(None, description="file that keeps the place in the data; without one, nothing is kept")
    poll_s: float = Field(POLL_S, gt=0, description="seconds between two questions for the version")
    drain_s: float = Field(DRAIN_S, ge=0, description="seconds that rollouts have to end once it is told to")


class RolloutConfig(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: DataConfig
    agent: AgentConfig
    gateway: GatewaySource
    rollout: RolloutSection
    workers: WorkersSection | None = Field(None, description="who plays; default: the rollouter's own process")
    base: Path | None = Field(None, description="the folder that paths are below; default: that of the file")

    @classmethod
    def read(cls, path: Path) -> RolloutConfig:
        """The configuration in a file. Raises `InvalidInput`, naming the file and each wrong field."""
        return checked(cls, read(path), path)

    @model_validator(mode="after")
    def _validated(self) -> RolloutConfig:
        if self.rollout.validate_every and self.data.val is None:
            raise ValueError("rollout.validate_every is given, but data.val is not: there is nothing to validate with")
        return self

    def rules(self, rows: int, val_rows: int) -> RolloutRules:
        """What holds for a run over data of so many rows; 0: there are none of that kind."""
        own = self.rollout
        return RolloutRules(
            rows=rows,
            val_rows=val_rows,
            n_rollouts=self.data.n_rollouts,
            val_rollouts=self.data.val_rollouts,
            shuffle=self.data.shuffle,
            seed=self.data.seed,
            batch_size=own.batch_size,
            max_staleness=own.max_staleness,
            concurrency=own.concurrency,
            retries=own.retries,
            retry_s=own.retry_s,
            steps=own.steps if rows else None,
            epochs=own.epochs,
            validate_every=own.validate_every if rows else ONCE,
            failed_groups=own.failed_groups,
            max_failed_groups=own.max_failed_groups,
            scored=own.scored,
            until_trained=own.until_trained,
        )
