"""A run as it is described to the simulation: rollouts, servers, gateways, pool and trainer, with their times.

Times of our own parts have defaults that were measured (docs/performance.md); those of a model server and of a trainer
depend on model and hardware, and their defaults are of a model of some billion parameters on one current GPU.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.data.errors import InvalidInput
from headrace.files import checked, read
from headrace.pool.config import ChannelConfig
from headrace.trainer.config import Section

#: How many standard deviations above the median the 99th percentile of a normal distribution lies.
P99_DEVIATIONS = 2.326


class Spread(Section):
    """How a figure varies: log-normally with a median and a 99th percentile, or as `samples` have it. A single number
    stands for one that does not vary."""

    median: float = Field(0.0, ge=0)
    p99: float | None = Field(None, ge=0, description="the 99th percentile; default: the median")
    samples: tuple[float, ...] = Field((), description="figures to draw from, in place of the other two")

    @model_validator(mode="after")
    def _grows(self) -> Spread:
        if self.p99 is not None and self.p99 < self.median:
            raise ValueError(f"p99 is {self.p99:g}, below the median of {self.median:g}")
        if self.p99 and not self.median:
            raise ValueError("the median is 0, and a p99 above it has no log-normal; give a median above 0, or samples")
        return self

    def draw(self, chance: random.Random) -> float:
        """One figure."""
        if self.samples:
            return chance.choice(self.samples)
        if self.p99 is None or self.p99 == self.median:
            return self.median
        return self.median * math.exp(chance.gauss(0.0, math.log(self.p99 / self.median) / P99_DEVIATIONS))


def _as_spread(given: Any) -> Any:
    return {"median": given} if isinstance(given, int | float) and not isinstance(given, bool) else given


Varying = Annotated[Spread, BeforeValidator(_as_spread)]


class RolloutTimes(Section):
    """What a rollout is: turns of one call each, with an environment between them."""

    turns: Varying = Spread(median=6, p99=40)
    prompt_tokens: Varying = Field(Spread(median=1000, p99=4000), description="of the first call")
    response_tokens: Varying = Field(Spread(median=200, p99=2000), description="sampled in a turn")
    observation_tokens: Varying = Field(Spread(median=200, p99=4000), description="added to the prompt by a turn")
    environment_s: Varying = Field(Spread(median=1, p99=30), description="between an answer and the next call")
    reward_s: Varying = Field(Spread(median=0), description="between a rollout's end and its reward")


class ServerTimes(Section):
    """The model servers. A server with n calls gives each a token every `token_ms + call_ms * n` milliseconds."""

    count: int = Field(8, ge=1)
    token_ms: float = Field(10.0, ge=0, description="a decoding step, whatever its batch")
    call_ms: float = Field(0.05, ge=0, description="what each call in the batch adds to it")
    prefill_tokens_s: float = Field(20_000.0, gt=0, description="prompt tokens that one server computes a second")
    max_calls: int = Field(256, ge=1, description="calls in a batch; more wait")

    @model_validator(mode="after")
    def _takes_time(self) -> ServerTimes:
        if not self.token_ms and not self.call_ms:
            raise ValueError("token_ms and call_ms are both 0: a token must take some time, such as token_ms: 10")
        return self


class GatewayTimes(Section):
    """The gateways: processes of one core each."""

    count: int = Field(1, ge=1)
    workers: int = Field(1, ge=1, description="processes of each")
    call_ms: float = Field(1.9, ge=0, description="CPU of one call")
    token_us: float = Field(
        0.0, ge=0, description="CPU of one token more; 63 where answers are streamed and flushed every 250 ms"
    )

    @property
    def processes(self) -> int:
        return self.count * self.workers


class PoolTimes(Section):
    """The pool: one process, which takes one call after the other, and the channel that it has."""

    step_us: float = Field(25.0, ge=0, description="CPU of one step, from its submit to its hand-out")
    max_queue_size: int = Field(100_000, ge=1)
    overflow: Literal["drop_oldest", "reject", "block"] = "drop_oldest"
    group_timeout_s: float | None = Field(None, gt=0)


class TrainerTimes(Section):
    """The trainer: what it takes, and how long it learns from it."""

    batch_size: int = Field(32, ge=1, description="groups a step")
    n_rollouts: int = Field(8, ge=1, description="rollouts a group")
    max_staleness: int | None = Field(2, ge=0, description="versions that what is trained on may be behind")
    step_s: Varying = Field(Spread(median=5), description="a step, whatever its tokens")
    tokens_s: float | None = Field(40_000.0, gt=0, description="tokens learned from in a second, beside that")
    sync_s: float = Field(2.0, ge=0, description="of publishing weights: the part in which it does nothing else")
    hold_s: float = Field(0.5, ge=0, description="and the part in which servers do not sample")


class Scenario(Section):
    """A whole run.

    source    who starts rollouts: `rollouter` (a dataset; it holds back what would grow too stale) or `live` (agents
              that play whatever the trainer does, as long as fewer than `ahead` groups are open or wait)
    """

    agents: int = Field(256, ge=1, description="rollouts that run at once")
    source: Literal["rollouter", "live"] = "rollouter"
    ahead: int | None = Field(None, ge=1, description="with source live: groups open or waiting at most")
    hours: float = Field(1.0, gt=0, le=1000, description="simulated time")
    seed: int = 0
    rollouts: RolloutTimes = RolloutTimes()
    servers: ServerTimes = ServerTimes()
    gateway: GatewayTimes = GatewayTimes()
    pool: PoolTimes = PoolTimes()
    trainer: TrainerTimes = TrainerTimes()
    #: Whole rollouts of a recorded run, to draw from in place of what `rollouts` says.
    plays: tuple[Play, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Scenario:
        if self.ahead is not None and self.source != "live":
            raise ValueError("ahead is of live agents; a rollouter is bounded by trainer.max_staleness")
        if self.source == "rollouter" and self.trainer.max_staleness is None:
            raise ValueError("a rollouter needs trainer.max_staleness, such as 2: it is what holds it back")
        if self.ahead is not None and self.ahead < self.trainer.batch_size:
            raise ValueError(
                f"ahead is {self.ahead}: a batch of {self.trainer.batch_size} groups would never be there at once"
            )
        if self.pool.max_queue_size < self.trainer.batch_size:
            raise ValueError(
                f"pool.max_queue_size is {self.pool.max_queue_size}: it never holds a batch of "
                f"{self.trainer.batch_size} groups"
            )
        return self

    @property
    def channel(self) -> ChannelConfig:
        """The pool's channel in this run."""
        return ChannelConfig(
            n_rollouts=self.trainer.n_rollouts,
            max_staleness=self.trainer.max_staleness,
            max_queue_size=self.pool.max_queue_size,
            overflow=self.pool.overflow,
            group_timeout_s=self.pool.group_timeout_s,
        )

    def changed(self, name: str, value: Any) -> Scenario:
        """This run with one figure changed, by its path (`servers.count`). Raises `InvalidInput` where it cannot be."""
        values = self.model_dump()
        *path, last = name.split(".")
        at: Any = values
        for part in path:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise InvalidInput(f"with {name}={value}: {part} is {at!r}, which has no fields; set {part} itself")
        at[last] = value
        return checked(Scenario, values, f"with {name}={value}")


class RecordedTurn(Section):
    """One call of a recorded rollout, and what came before it."""

    wait_s: float = Field(ge=0, description="between the answer before, or the rollout's begin, and this call")
    new_tokens: int = Field(ge=0, description="prompt tokens that the call before did not have")
    response_tokens: int = Field(ge=1)


class Play(Section):
    """A recorded rollout."""

    turns: tuple[RecordedTurn, ...] = Field(min_length=1)
    reward_s: float = Field(0.0, ge=0)


def read_scenario(path: Path) -> Scenario:
    """The scenario in a YAML, JSON or TOML file. Raises `InvalidInput`, naming each wrong field."""
    return checked(Scenario, read(path), path)
