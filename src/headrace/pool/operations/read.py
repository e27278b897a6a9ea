"""Operations that only look: one trajectory, numbers, events, and pages of groups, trajectories and steps."""

from __future__ import annotations

from typing import Any

from headrace.data.trajectory import Trajectory
from headrace.pool import queries
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.operation import Read
from headrace.pool.state import Event, State


class ReadTrajectory(Read[Trajectory], frozen=True):
    """The `Trajectory` as it stands; `NotFound` where it is unknown or gone."""

    name = "trajectory"
    any_channel = True

    trajectory_uid: str
    channel: str | None = None

    def read(self, state: State, now: float) -> Trajectory:
        return queries.trajectory(state, self.trajectory_uid, self.channel)


class ReadStats(Read[dict[str, Any]], frozen=True):
    """The ledger, queue and configuration of one channel, or of all; see docs/pool.md."""

    name = "stats"
    any_channel = True

    channel: str | None = None

    def read(self, state: State, now: float) -> dict[str, Any]:
        return queries.stats(state, self.channel)


class ReadEvents(Read[list[Event]], frozen=True):
    """What happened from `cursor` on: drops, late rewards, redeliveries, versions, ..., oldest first."""

    name = "events"

    cursor: int = 0
    limit: int = 1000

    def read(self, state: State, now: float) -> list[Event]:
        return queries.events(state, self.cursor, self.limit)


class ListGroups(Read[dict[str, Any]], frozen=True):
    """A page of a channel's groups."""

    name = "list_groups"

    channel: str
    filters: dict[str, Any]

    def read(self, state: State, now: float) -> dict[str, Any]:
        return queries.list_groups(state, self.channel, self.filters)


class ListTrajectories(ListGroups, frozen=True):
    """A page of a channel's trajectories."""

    name = "list_trajectories"

    def read(self, state: State, now: float) -> dict[str, Any]:
        return queries.list_trajectories(state, self.channel, self.filters)


class ListSteps(ListGroups, frozen=True):
    """A page of a channel's steps."""

    name = "list_steps"

    def read(self, state: State, now: float) -> dict[str, Any]:
        return queries.list_steps(state, self.channel, self.filters)


def list_groups(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListGroups:
    """A page of groups: `{"items": [...], "next": cursor or None}`. Filters: state, prompt_uid, cursor, limit."""
    return ListGroups(channel, filters)


def list_trajectories(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListTrajectories:
    """Likewise of trajectories; filters also: complete, min_reward, max_reward."""
    return ListTrajectories(channel, filters)


def list_steps(channel: str = DEFAULT_CHANNEL, **filters: Any) -> ListSteps:
    """Likewise of steps, without their tokens; filters also: trajectory_uid, trainable, tag, quarantined."""
    return ListSteps(channel, filters)
