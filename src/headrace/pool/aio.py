"""`AsyncPool`: the types of a pool's awaitable twins, the same calls as `Calls` has.

A test holds the two to each other, name by name and argument by argument.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from headrace.data.step import Step
from headrace.data.trajectory import Trajectory
from headrace.pool.batch import Batch
from headrace.pool.config import DEFAULT_CHANNEL, ChannelConfig
from headrace.pool.desk.aio import AsyncDesk
from headrace.pool.plan import Completion, Receipt
from headrace.pool.state import Event


class AsyncPool(AsyncDesk, Protocol):
    """What `pool.aio` offers; see `Calls` for what each call does."""

    async def submit_steps(
        self, steps: Sequence[Step | dict[str, Any]], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
    ) -> Receipt: ...

    async def submit_step(
        self, step: Step | dict[str, Any], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
    ) -> Receipt: ...

    async def open(
        self,
        trajectory_uid: str,
        prompt_uid: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        metadata: dict[str, Any] | None = None,
        n_rollouts: int | None = None,
        *,
        move: bool = False,
        keep: bool = False,
    ) -> None: ...

    async def reward(
        self, trajectory_uid: str, reward: float, step_index: int | None = None, channel: str | None = None
    ) -> str: ...

    async def complete(
        self, trajectory_uid: str, reward: float | None = None, channel: str | None = None
    ) -> Completion: ...

    async def complete_trajectory(
        self, trajectory_uid: str, reward: float | None = None, channel: str | None = DEFAULT_CHANNEL
    ) -> bool: ...

    async def fetch_batch(
        self,
        batch_size: int,
        n_rollouts: int | None = None,
        channel: str = DEFAULT_CHANNEL,
        order: str = "fifo",
        max_staleness: int | None = None,
        lease_s: float | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        unit: str = "group",
    ) -> Batch | None: ...

    async def ack(self, lease_id: str, channel: str = DEFAULT_CHANNEL) -> None: ...

    async def nack(self, lease_id: str, channel: str = DEFAULT_CHANNEL) -> None: ...

    async def extend(self, lease_id: str, lease_s: float, channel: str = DEFAULT_CHANNEL) -> float: ...

    async def configure(self, channel: str = DEFAULT_CHANNEL, **options: Any) -> ChannelConfig: ...

    async def set_version(self, version: int, channel: str | None = None) -> None: ...

    async def shutdown(self, channel: str | None = None) -> None: ...

    async def reopen(self, channel: str | None = None) -> None: ...

    async def curate(
        self, trajectory_uid: str, step_index: int, channel: str | None = None, **changes: Any
    ) -> None: ...

    async def forget(self, trajectory_uid: str, channel: str | None = None, *, erase: bool = True) -> bool: ...

    async def trajectory(self, trajectory_uid: str, channel: str | None = None) -> Trajectory: ...

    async def stats(self, channel: str | None = None) -> dict[str, Any]: ...

    async def events(self, cursor: int = 0, limit: int = 1000) -> list[Event]: ...

    async def list_groups(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]: ...

    async def list_trajectories(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]: ...

    async def list_steps(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]: ...

    async def compact(self) -> None: ...

    async def backup(self, to: str | os.PathLike[str]) -> None: ...
