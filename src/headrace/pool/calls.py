"""The calls of a pool, written once: blocking on a pool itself, awaitable on its `aio`.

Each is an operation's name and plain arguments handed to `_do`, which an embedded pool carries out and a remote one
sends. So what is true of one pool is true of all.
"""

# What `_do` returns depends on the operation: the signatures below are where each answer's type is stated.
# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headrace.data.block import Block
from headrace.data.errors import InvalidInput, shown
from headrace.data.packing import pack
from headrace.data.step import Step
from headrace.data.trajectory import Trajectory
from headrace.pool.batch import Batch
from headrace.pool.config import DEFAULT_CHANNEL, ChannelConfig
from headrace.pool.desk.calls import DeskCalls
from headrace.pool.plan import Completion, Receipt
from headrace.pool.state import Event
from headrace.pool.views import HandOut


class Calls(DeskCalls, ABC):
    """What a producer, a consumer or a reader can ask of a pool."""

    @abstractmethod
    def _do(
        self, op: str, args: dict[str, Any], block: Block | None = None, then: Callable[[Any], Any] | None = None
    ) -> Any:
        """Carries an operation out and returns its answer, passed through `then`."""

    def _wrap(self, handout: HandOut | None) -> Batch | None:
        if handout is None:
            return None
        lease = handout.lease or None
        return Batch(handout.groups, handout.channel, lease, handout.deadline if lease else None, self)

    # -- producers -----------------------------------------------------------------------------------------------------

    def submit_steps(
        self, steps: Sequence[Step | dict[str, Any]], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
    ) -> Receipt:
        """Takes all the steps, or none. `timeout` bounds the wait for room (`overflow="block"`)."""
        if isinstance(steps, Step | dict | str) or not hasattr(steps, "__len__"):
            raise InvalidInput(f"steps must be a list of steps, not {shown(steps)}")
        return self._do("submit", {"channel": channel, "timeout": timeout}, pack(steps))

    def submit_step(
        self, step: Step | dict[str, Any], channel: str = DEFAULT_CHANNEL, *, timeout: float | None = None
    ) -> Receipt:
        return self.submit_steps([step], channel, timeout=timeout)

    def open(
        self,
        trajectory_uid: str,
        prompt_uid: str | None = None,
        channel: str = DEFAULT_CHANNEL,
        metadata: dict[str, Any] | None = None,
        n_rollouts: int | None = None,
        *,
        move: bool = False,
        keep: bool = False,
    ) -> None:
        """Announces a trajectory before its first step; again, it adds metadata, or moves one that has no step yet
        to another group; with `move`, also out of any other channel. With `keep`, metadata that is there stays: another
        value for it is a `Conflict`."""
        args = {"trajectory_uid": trajectory_uid, "prompt_uid": prompt_uid, "channel": channel}
        return self._do("open", {**args, "metadata": metadata, "n_rollouts": n_rollouts, "move": move, "keep": keep})

    def reward(
        self, trajectory_uid: str, reward: float, step_index: int | None = None, channel: str | None = None
    ) -> str:
        """Sets the reward of a step, or of the last; `"ok"`, or `"late"` once the group is handed out."""
        return self._do(
            "reward", {"trajectory_uid": trajectory_uid, "reward": reward, "step_index": step_index, "channel": channel}
        )

    def complete(self, trajectory_uid: str, reward: float | None = None, channel: str | None = None) -> Completion:
        """Ends a trajectory, with a reward for its last step where one is given; returns a `Completion`."""
        return self._do("complete", {"trajectory_uid": trajectory_uid, "reward": reward, "channel": channel})

    def complete_trajectory(
        self, trajectory_uid: str, reward: float | None = None, channel: str | None = DEFAULT_CHANNEL
    ) -> bool:
        """`complete` for those who only ask whether it was in time: true, or false where unknown or late."""
        return self._do(
            "complete",
            {"trajectory_uid": trajectory_uid, "reward": reward, "channel": channel},
            then=lambda done: done.status == "ok",
        )

    # -- consumers -----------------------------------------------------------------------------------------------------

    def fetch_batch(
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
    ) -> Batch | None:
        """`batch_size` ready groups (or steps, with `unit="step"`) as a `Batch`; None after `timeout`, or at the end.

        Blocks for ever with `timeout=None`, polls with 0; where too little is there, nothing is consumed. Without
        `lease_s` the groups are consumed when handed out. The same `request_id` gets the same batch again.
        """
        args: dict[str, Any] = {
            "batch_size": batch_size,
            "n_rollouts": n_rollouts,
            "channel": channel,
            "order": order,
            "unit": unit,
        }
        args |= {"max_staleness": max_staleness, "lease_s": lease_s, "timeout": timeout, "request_id": request_id or ""}
        return self._do("fetch", args, then=self._wrap)

    def ack(self, lease_id: str, channel: str = DEFAULT_CHANNEL) -> None:
        return self._do("ack", {"lease_id": lease_id, "channel": channel})

    def nack(self, lease_id: str, channel: str = DEFAULT_CHANNEL) -> None:
        return self._do("nack", {"lease_id": lease_id, "channel": channel})

    def extend(self, lease_id: str, lease_s: float, channel: str = DEFAULT_CHANNEL) -> float:
        return self._do("extend", {"lease_id": lease_id, "lease_s": lease_s, "channel": channel})

    # -- control -------------------------------------------------------------------------------------------------------

    def configure(self, channel: str = DEFAULT_CHANNEL, **options: Any) -> ChannelConfig:
        """Changes a channel's options (see `ChannelConfig`); returns all of them."""
        return self._do("configure", {"channel": channel, "options": options})

    def set_version(self, version: int, channel: str | None = None) -> None:
        """The policy's new version, in one channel or in all; steps that do not name theirs get it."""
        return self._do("set_version", {"version": version, "channel": channel})

    def shutdown(self, channel: str | None = None) -> None:
        """Ends a channel, or all: no more submits; fetches return what is left, then None."""
        return self._do("shutdown", {"channel": channel})

    def reopen(self, channel: str | None = None) -> None:
        """Undoes `shutdown`, which outlives a restart: a finished run goes on."""
        return self._do("reopen", {"channel": channel})

    def curate(self, trajectory_uid: str, step_index: int, channel: str | None = None, **changes: Any) -> None:
        """Sets `quality`, `trainable`, `tags` or `note` of a step; untrainable steps become context."""
        return self._do(
            "curate",
            {"trajectory_uid": trajectory_uid, "step_index": step_index, "channel": channel, "changes": changes},
        )

    def forget(self, trajectory_uid: str, channel: str | None = None, *, erase: bool = True) -> bool:
        """Removes a trajectory's content for good: from memory, and from the journal's files, which are rewritten for
        it. Without `erase` they are not: its bytes go when they are rewritten next, for whatever reason."""
        return self._do("forget", {"trajectory_uid": trajectory_uid, "channel": channel, "erase": erase})

    # -- reading -------------------------------------------------------------------------------------------------------

    def trajectory(self, trajectory_uid: str, channel: str | None = None) -> Trajectory:
        """The `Trajectory` as it stands; `NotFound` where it is unknown or gone."""
        return self._do("trajectory", {"trajectory_uid": trajectory_uid, "channel": channel})

    def stats(self, channel: str | None = None) -> dict[str, Any]:
        """The ledger, queue and configuration of one channel, or of all; see docs/pool.md."""
        return self._do("stats", {"channel": channel})

    def events(self, cursor: int = 0, limit: int = 1000) -> list[Event]:
        """What happened from `cursor` on: drops, late rewards, redeliveries, versions, ..., oldest first."""
        return self._do("events", {"cursor": cursor, "limit": limit})

    def list_groups(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]:
        """A page of groups: `{"items": [...], "next": cursor or None}`. Filters: state, prompt_uid, cursor, limit."""
        return self._do("list_groups", {"channel": channel, "filters": filters})

    def list_trajectories(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]:
        """Likewise of trajectories; filters also: complete, min_reward, max_reward."""
        return self._do("list_trajectories", {"channel": channel, "filters": filters})

    def list_steps(self, channel: str = DEFAULT_CHANNEL, **filters: Any) -> dict[str, Any]:
        """Likewise of steps, without their tokens; filters also: trajectory_uid, trainable, tag, quarantined."""
        return self._do("list_steps", {"channel": channel, "filters": filters})

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def compact(self) -> None:
        """Rewrites the journal as a snapshot of what lives, and deletes the rest."""
        return self._do("compact", {})

    def backup(self, to: str | os.PathLike[str]) -> None:
        """Copies the journal, as it is now, to an empty folder on the pool's machine."""
        return self._do("backup", {"to": os.fspath(to)})
