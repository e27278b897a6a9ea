"""What a configuration says of the data and the agent: `data` and `agent` of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.data.errors import InvalidInput
from headrace.files import expanded
from headrace.flows.black_box import BlackBoxAgentFlow, black_box_agent
from headrace.flows.dataset import Dataset
from headrace.flows.flow import TIMEOUT_S, AgentFlowBase
from headrace.flows.gateway_client import GatewayClient
from headrace.flows.registry import flow_of
from headrace.flows.task import HIDDEN_COLUMNS

#: Kinds of agents, of which a configuration names one.
KINDS = ("run", "command", "flow", "env")


class DataConfig(BaseModel):
    """Which rows are played, and how often each. Paths are below the configuration's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    train: Path | None = Field(None, description="rows to learn from: JSONL, Parquet, or a folder of `datasets`")
    val: Path | None = Field(None, description="rows to validate with, which are never learned from")
    n_rollouts: int = Field(8, ge=1, description="rollouts of each row of train: the size of its group")
    val_rollouts: int = Field(1, ge=1, description="rollouts of each row of val")
    shuffle: bool = Field(True, description="another order of train's rows in each epoch")
    seed: int = Field(0, description="of the order")
    prompt: str | None = Field(None, description="column of the conversation; default: messages, prompt or question")
    hidden: list[str] = Field(list(HIDDEN_COLUMNS), description="columns that agents are not shown")

    @model_validator(mode="after")
    def _some(self) -> DataConfig:
        if self.train is None and self.val is None:
            raise ValueError("neither train nor val is given; one of them has the rows")
        return self

    def train_rows(self, base: Path) -> Dataset | None:
        """The rows to learn from, read and checked; None where there are none."""
        return self._rows(self.train, base)

    def val_rows(self, base: Path) -> Dataset | None:
        """The rows to validate with, likewise."""
        return self._rows(self.val, base)

    def _rows(self, path: Path | None, base: Path) -> Dataset | None:
        if path is None:
            return None
        rows = Dataset.read(base / expanded(path))
        if self.prompt is not None:  # an agent may take its task from any column, where none is named
            rows.check_prompts(self.prompt)
        return rows


class AgentConfig(BaseModel):
    """Who plays: exactly one of `run`, `command`, `flow` and `env`. Paths are below the configuration's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str | None = Field(None, description="a function or coroutine, as file.py:function or module:function")
    command: str | list[str] | None = Field(None, description="a command line; a text is a shell's, a list is not")
    flow: str | dict[str, Any] | None = Field(
        None, description="a flow's registered name, or {name, _target_: file.py:Class, and its options}"
    )
    env: str | None = Field(None, description="the file of an environment, which is no flow")
    timeout_s: float = Field(TIMEOUT_S, gt=0, description="longest rollout, in seconds; what takes longer is ended")
    process: bool | None = Field(
        None, description="whether `run` is called in a process of its own; default: a function is, a coroutine is not"
    )
    model: str | None = Field(None, description="the model that is asked for, where the gateway serves several")
    sampling: dict[str, Any] = Field({}, description="overrides what every call asks for, such as temperature: 1.0")

    @model_validator(mode="after")
    def _one(self) -> AgentConfig:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            told = " and ".join(given) if given else "none"
            raise ValueError(f"give exactly one of {', '.join(KINDS)}; given: {told}")
        if self.process is not None and self.run is None:
            raise ValueError(f"process is about `run`; {given[0]} has no such choice")
        return self

    @property
    def kind(self) -> str:
        """Which of the four it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    def made(self, gateway: GatewayClient, base: Path) -> AgentFlowBase:
        """The flow that plays this agent. Nothing is started; the agent's file is imported. Raises `InvalidInput`
        where there is no such file, function, flow or program, or its options are wrong."""
        common: dict[str, Any] = {"timeout_s": self.timeout_s, "model": self.model, "sampling": self.sampling}
        if self.env is not None:
            raise InvalidInput(f"agent.env: {self.env} is an environment, which plays by itself; it is no flow")
        if self.flow is not None:
            return flow_of(self.flow, gateway, base, **common)
        agent = black_box_agent(base, run=self.run, command=self.command, process=self.process)
        return BlackBoxAgentFlow(gateway, agent, **common)
