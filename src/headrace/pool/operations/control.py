"""Operations that steer a pool: options, versions, shutdown, curation, forgetting, and the journal's upkeep."""

from __future__ import annotations

import os
from typing import Any

from headrace.data.block import pack_extra
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import (
    INT32_MAX,
    check_count,
    check_finite,
    check_tags,
)
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL, ChannelConfig
from headrace.pool.errors import Conflict, NotFound
from headrace.pool.operation import Change, Plan, Upkeep
from headrace.pool.state import State

#: The field of a step's metadata that says who curated it last, and when.
CURATION_FIELD = "curation"


class ConfigureChannel(Change[ChannelConfig], frozen=True):
    """Changes a channel's options; returns all of them."""

    name = "configure"

    channel: str
    options: dict[str, Any]

    def plan(self, state: State, now: float) -> Plan:
        config = state.look(self.channel).config.changed(self.options)
        return Plan([f.Configured(self.channel, now, config)], reply=config)


def configure(channel: str = DEFAULT_CHANNEL, **options: Any) -> ConfigureChannel:
    """Changes a channel's options (see `ChannelConfig`); returns all of them."""
    return ConfigureChannel(channel, options)


class SetVersion(Change[None], frozen=True):
    """The policy's new version, in one channel or in all; steps that do not name theirs get it."""

    name = "set_version"
    any_channel = True

    version: int
    channel: str | None = None

    def plan(self, state: State, now: float) -> Plan:
        version = check_count(self.version, "version", most=INT32_MAX)
        names = _channels(state, self.channel)
        for name in names:
            current = state.look(name).version
            if version < current:
                raise InvalidInput(f"version {version} is below {current} of channel {name!r}; versions only rise")
        return Plan([f.Versioned(name, now, version, self.channel is None) for name in names])


class ShutDown(Change[None], frozen=True):
    """Ends a channel, or all: no more submits; fetches return what is left, then None."""

    name = "shutdown"
    any_channel = True

    channel: str | None = None

    def plan(self, state: State, now: float) -> Plan:
        return _set_closed(state, now, self.channel, closed=True)


class Reopen(Change[None], frozen=True):
    """Undoes `shutdown`, which outlives a restart: a finished run goes on."""

    name = "reopen"
    any_channel = True

    channel: str | None = None

    def plan(self, state: State, now: float) -> Plan:
        return _set_closed(state, now, self.channel, closed=False)


def _set_closed(state: State, now: float, channel: str | None, *, closed: bool) -> Plan:
    """Without a channel's name: all of them, and those yet to come."""
    names, everywhere = _channels(state, channel), channel is None
    if not (everywhere and state.closed != closed):
        names = [name for name in names if state.look(name).closed != closed]
    return Plan([f.Closed(name, now, closed, everywhere) for name in names])


def _channels(state: State, channel: str | None) -> list[str]:
    return [channel] if channel is not None else list(state.channels) or [DEFAULT_CHANNEL]


class CurateStep(Change[None], frozen=True):
    """Sets what people decided about a step."""

    name = "curate"
    any_channel = True

    trajectory_uid: str
    step_index: int
    changes: dict[str, Any]
    channel: str | None = None

    def plan(self, state: State, now: float) -> Plan:
        uid, index = self.trajectory_uid, check_count(self.step_index, "step_index")
        channel, known = state.find(uid, self.channel)
        if known is None or index not in known.tree.records:
            raise NotFound(f"no step {index} of trajectory {uid!r} in channel {channel.name!r} to curate")
        if known.handed_out(index):
            raise Conflict(f"trajectory {uid!r} is with a consumer; it can be curated until then")
        extra = known.tree.records[index].head.unpack_extra()
        for name, value in self.changes.items():
            if name == "by":
                extra.metadata = {**extra.metadata, CURATION_FIELD: {"by": _checked_curation(name, value), "at": now}}
            else:
                setattr(extra, name, _checked_curation(name, value))
        return Plan([f.Amended(channel.name, now, uid, index, extra=pack_extra(extra))])


def curate(trajectory_uid: str, step_index: int, channel: str | None = None, **changes: Any) -> CurateStep:
    """Sets `quality`, `trainable`, `tags` or `note` of a step; untrainable steps become context. `by` says who did it,
    and is kept with the time in the step's metadata, as `curation`."""
    return CurateStep(trajectory_uid, step_index, changes, channel)


def _checked_curation(name: str, value: Any) -> Any:
    if name == "trainable" and type(value) is bool:
        return value
    if name == "quality" and (value is None or isinstance(value, int | float)):
        return value if value is None else check_finite(value, "quality")
    if name == "by" and isinstance(value, str):
        return value
    if name == "note" and (value is None or isinstance(value, str)):
        return value
    if name == "tags":
        return check_tags(value)
    raise InvalidInput(
        f"{name} = {shown(value)}: curation takes trainable (bool), quality (number), tags (strings), note "
        "(string), by (string)"
    )


class _Forget(Change[bool], frozen=True):
    trajectory_uid: str
    channel: str | None = None


class ForgetTrajectory(_Forget, frozen=True, kw_only=True):
    """Removes a trajectory's content for good: from memory, and from the journal's files, which are rewritten for it. A
    scored group that was made of it goes whole. Without `erase` the files are not rewritten: its bytes go when they are
    next, for whatever reason. False where the trajectory is unknown; one that was forgotten is known as that, and can
    be forgotten again."""

    name = "forget"
    any_channel = True

    erase: bool = True

    @property
    def takes_long(self) -> bool:
        return self.erase

    def plan(self, state: State, now: float) -> Plan:
        names = [self.channel] if self.channel is not None else list(state.channels)
        found = [
            name
            for name in names
            if _holds(state.look(name), self.trajectory_uid) or state.scored.holds(name, self.trajectory_uid)
        ]
        known = bool(found) or any(self.trajectory_uid in state.look(name).tombstones for name in names)
        return Plan([f.Forgotten(name, now, self.trajectory_uid) for name in found], reply=known)


def _holds(channel: Channel, trajectory: str) -> bool:
    return (
        trajectory in channel.trajectories
        or (trajectory in channel.tombstones and channel.tombstones[trajectory].reason != "forgotten")
        or any(trajectory in group.trajectories for group in channel.history.values())
        or any(lease.holds(trajectory) for lease in (*channel.replies.values(), *channel.leases.values()))
    )


class CompactJournal(Upkeep, frozen=True):
    """Rewrites the journal as a snapshot of what lives, and deletes the rest."""

    name = "compact"


class BackUpJournal(Upkeep, frozen=True):
    """Copies the journal, as it is now, to a folder on the pool's machine."""

    name = "backup"
    sent_once = (
        "the backup may be there, or still be made: look into its folder with `headrace pool verify`, or name another "
        "folder"
    )

    to: str


def backup(to: str | os.PathLike[str]) -> BackUpJournal:
    """Copies the journal, as it is now, to an empty folder on the pool's machine."""
    return BackUpJournal(os.fspath(to))
