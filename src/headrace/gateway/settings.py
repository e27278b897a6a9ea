"""How a gateway behaves. A value that could not work is refused when it is given, by its field.

`GatewaySettings` is what `create_app` takes; the command line adds where the pool is and where to listen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.dashboard import DASHBOARD_HELP, DashboardMode
from headrace.data.errors import InvalidInput
from headrace.files import Key
from headrace.gateway.flushing import FlushTimes
from headrace.pool.config import MAX_CHANNEL_NAME

#: Connections beside those of calls, unless the settings say otherwise: idle ones, and those of who looks in.
SPARE_CONNECTIONS = 4096

Balance = Literal["round-robin", "sticky", "least-busy"]


class GatewaySettings(BaseModel):
    """What a gateway needs to know beside its pool."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vllm_addresses: str | None = Field(None, description="rollout servers, as http://host1:8001,http://host2:8001")
    tokenizer_path: str | None = Field(
        None,
        description="folder of the served model's tokenizer and chat template (default: the root that the rollout "
        "server tells in /v1/models)",
    )
    models: str | None = Field(
        None,
        description="file (YAML, JSON or TOML) of models by name: trained, only recorded, or passed on to",
    )
    prompt_length: int | None = Field(
        None, ge=1, description="longest prompt in tokens; a longer one is refused, never cut (default: the model's)"
    )
    response_length: int | None = Field(
        None, ge=1, description="default and cap of max_tokens (default: what the model's context leaves)"
    )
    history: Literal["bridge", "template"] = Field(
        "bridge",
        description="a continued conversation keeps its exact tokens (bridge), or is rendered as the template would",
    )
    renderer: str = Field("auto", description="auto: proven against the template; template; or a family by name")
    chat_template: str | None = Field(
        None, description="which of the tokenizer's templates, by name, or a file (default: the tokenizer's own)"
    )
    open: bool = Field(
        False, description="accept calls for trajectories that nobody began, and for a live service under root /v1"
    )
    session_idle_s: float = Field(
        1800, gt=0, description="with --open: a conversation under root /v1 is complete after so long without a call"
    )

    balance: Balance = Field("round-robin", description="how calls are spread over the rollout servers")
    wire: Literal["auto", "completions", "generate"] = Field(
        "auto", description="vLLM's route: /v1/completions, /inference/v1/generate, or what the server has and can do"
    )
    logprobs_mode: Literal["auto", "processed", "raw"] = Field(
        "auto", description="which log-probs the servers must give; auto: any, as long as they agree"
    )
    upstream_key: Key = Field(None, description="key for the rollout servers (or set HEADRACE_UPSTREAM_KEY)")
    connect_s: float = Field(5, gt=0, description="longest wait for a connection to a rollout server")
    idle_s: float = Field(
        600, gt=0, description="longest silence of a rollout server, or wait for an agent to read on, within a call"
    )
    call_s: float = Field(3600, gt=0, description="longest call in all")

    api_key: Key = Field(None, description="key that agents must present (or set HEADRACE_API_KEY)")
    reward_key: Key = Field(
        None, description="key for rewards and completions, so that an agent cannot pay itself (or HEADRACE_REWARD_KEY)"
    )
    admin_key: Key = Field(
        None, description="key for policy versions, servers, pausing and the pool (or HEADRACE_ADMIN_KEY)"
    )
    tenants: str | None = Field(
        None, description="file (YAML, JSON or TOML) of tenants: their keys, channels, rates and bounds"
    )
    backups: str | None = Field(
        None,
        min_length=1,
        description="folder below which the pool's `backup` may copy its journal; without one it is refused",
    )
    max_body_mb: float = Field(64, gt=0, description="largest request that is taken")
    max_in_flight: int = Field(4096, ge=1, description="calls at once; more are answered 503 with Retry-After")
    memory_mb: float = Field(
        2048,
        ge=1,
        description="what calls under way may hold in all: requests, answers, what clients do not read; likewise",
    )
    max_connections: int | None = Field(
        None,
        ge=2,
        description="connections at once; beyond them, those that ask for nothing are closed "
        "(default: 4096 more than --max-in-flight)",
    )
    keep_alive_s: float = Field(
        15, gt=0, description="a silent stream gets a comment so often, so that nobody hangs up"
    )

    stream_flush_ms: str = Field(
        "50",
        description="a stream's first token goes at once, then what came within so many ms (0: every token by itself); "
        "by channel as in 50,rollouts:250",
    )

    ack: Literal["outbox", "pool"] = Field(
        "outbox", description="what an answer's last byte waits for: the outbox, or a remote pool's own acknowledgement"
    )
    outbox_mb: float = Field(256, gt=0, description="steps that may wait for a pool that is out of reach")
    cached_tokens: int = Field(50_000_000, ge=0, description="tokens of running trajectories kept in memory")

    serve_channel: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CHANNEL_NAME,
        description="a channel whose groups the Trajectory API's trainers get too, and its environments feed",
    )
    heartbeat_s: float = Field(300, gt=0, description="an environment that did not call for so long has no weight")
    dashboard: DashboardMode = Field("edit", description=DASHBOARD_HELP)
    dashboard_metrics: str | None = Field(
        None,
        min_length=1,
        description="a trainer's metrics.jsonl, whose curves the dashboard shows; it need not be there yet",
    )

    sampling: list[str] = Field(
        [], description="parameters that a channel forces, as CHANNEL:name=value,...; may be given several times"
    )
    refuse: list[str] = Field([], description="values that a channel refuses, as CHANNEL:temperature=0; likewise")
    redact: str | None = Field(
        None, description="function that may drop a step before it is kept, as module:function or file.py:function"
    )
    reward: str | None = Field(
        None, description="file (YAML, JSON or TOML) of the reward that /compute_reward answers with, in this process"
    )
    reward_worker_name: str | None = Field(
        None, min_length=1, description="the Ray actor that /compute_reward asks, of a `headrace reward start --name`"
    )

    @model_validator(mode="after")
    def _spare_connections(self) -> Self:
        if self.max_connections is not None and self.max_connections <= self.max_in_flight:
            raise ValueError(
                f"max_connections is {self.max_connections} and max_in_flight {self.max_in_flight}: calls would leave "
                f"no connection for health checks; --max-connections {self.max_in_flight + SPARE_CONNECTIONS} would"
            )
        return self

    @field_validator("reward")
    @classmethod
    def _reward(cls, given: str | None) -> str | None:
        if given is not None:
            from headrace.rewards.config import RewardConfig  # only whoever has such a file waits for it

            RewardConfig.read(Path(given))
        return given

    @model_validator(mode="after")
    def _one_reward(self) -> Self:
        if self.reward is not None and self.reward_worker_name is not None:
            raise ValueError("--reward scores in this process and --reward-worker-name asks an actor; give one")
        return self

    @field_validator("vllm_addresses")
    @classmethod
    def _addresses(cls, given: str | None) -> str | None:
        if given is None:
            return None
        addresses = [part.strip().rstrip("/") for part in given.split(",") if part.strip()]
        if not addresses:
            raise ValueError("it must name at least one rollout server, such as http://127.0.0.1:8001")
        for address in addresses:
            if not address.startswith(("http://", "https://")):
                raise ValueError(f"{address!r} is no address; it looks like http://127.0.0.1:8001")
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"{given!r} names a server twice")
        return ",".join(addresses)

    @field_validator("tokenizer_path")
    @classmethod
    def _tokenizer(cls, given: str | None) -> str | None:
        if given is not None and not given.strip():
            raise ValueError("it is empty; name the folder of the served model, or leave it out: its server tells it")
        return given

    @field_validator("redact")
    @classmethod
    def _redact(cls, given: str | None) -> str | None:
        module, colon, name = (given or "a:b").rpartition(":")
        if not colon or not module or not name.isidentifier():
            raise ValueError(f"{given!r} should be module:function or file.py:function, as in rules.py:keep")
        return given

    @field_validator("tenants")
    @classmethod
    def _tenants(cls, given: str | None) -> str | None:
        if given is not None:
            from headrace.gateway.config_files import read_tenants

            read_tenants(Path(given))
        return given

    @field_validator("stream_flush_ms", mode="before")
    @classmethod
    def _flush_times(cls, given: Any) -> Any:
        text = f"{given:g}" if isinstance(given, int | float) and not isinstance(given, bool) else given
        if isinstance(text, str):
            FlushTimes(text)
        return text

    @field_validator("sampling", "refuse")
    @classmethod
    def _by_channel(cls, given: list[str]) -> list[str]:
        for spec in given:
            channel_values(spec)
        return given

    @model_validator(mode="after")
    def _served(self) -> Self:
        """Whatever is recorded needs servers, its own or those of the flags."""
        wanting = self._unserved()
        if wanting and self.vllm_addresses is None:
            raise ValueError("; ".join(f"--vllm-addresses must be given{instead}" for instead in wanting))
        return self

    def _unserved(self) -> list[str]:
        """For each recorded model without servers of its own: where it could have them beside the flags."""
        if self.models is None:
            return [""]
        from headrace.gateway.config_files import read_models  # only whoever has such a file waits for it

        file = read_models(Path(self.models))
        own = [
            f"addresses of model {name!r}" for name, spec in file.models.items() if spec.recorded and not spec.servers
        ]
        return [f", or {where} in --models" for where in (own if file.default is not None else [*own, "a default"])]

    @property
    def addresses(self) -> list[str]:
        """The rollout servers, one by one."""
        return (self.vllm_addresses or "").split(",")

    @property
    def most_connections(self) -> int:
        """How many connections one process holds at once."""
        return self.max_connections if self.max_connections is not None else self.max_in_flight + SPARE_CONNECTIONS

    @property
    def keyed(self) -> bool:
        """Whether any key is set."""
        return any((self.api_key, self.reward_key, self.admin_key, self.tenants))


def channel_values(spec: str) -> tuple[str, dict[str, Any]]:
    """`train:temperature=1,top_p=1` as a channel and what it says of parameters."""
    channel, _, rest = spec.partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise InvalidInput(f"{spec!r}: {part!r} should be name=value, as in train:temperature=1")
        try:
            values[name.strip()] = msgspec.json.decode(value.strip())
        except msgspec.DecodeError:
            raise InvalidInput(f"{spec!r}: {value!r} is no number, true or false") from None
    if not channel or not values:
        raise InvalidInput(f"{spec!r} should be CHANNEL:name=value,..., as in train:temperature=1")
    return channel, values
