"""Configuration of a pool and its channels. A value that could not work is refused when it is given, by its field."""

from __future__ import annotations

import difflib
from typing import Any, Literal, get_args

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.data.step import check_finite

Overflow = Literal["drop_oldest", "reject", "block"]
OnTimeout = Literal["drop", "partial"]
Order = Literal["fifo", "latest", "mixed"]
Unit = Literal["group", "step"]
Durability = Literal["memory", "os", "fsync"]

DEFAULT_CHANNEL = "train"
#: MB of payloads that a pool with a journal keeps in memory: a million steps and their index stay below 2 GiB with it.
DEFAULT_MEMORY_MB = 1024.0
#: Characters of a channel's name; a lease's id is that name and a number.
MAX_CHANNEL_NAME = 200
#: What an integer option is at most: a journal holds no larger one.
MAX_OPTION = 2**64 - 1


class ChannelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one channel behaves.

    max_queue_size    groups held, leased ones included
    overflow          what a new group meets in a full channel: another makes room (an empty one, else the oldest), an
                      error, or a wait
    by_owner          a group that makes room is one of the owner's with the most groups; the owner is what stands
                      before the first slash of a prompt's uid
    n_rollouts        trajectories that make a group ready, where a trajectory does not say itself
    require_reward    a trajectory counts only once one of its steps has a reward
    group_timeout_s   an incomplete group without news for so long is dropped, or served partial
    on_timeout        which of the two
    max_staleness     versions that a group's oldest step may be behind; None: any
    history_size      consumed groups kept for replay (`order="mixed"`)
    replay_share      the share of a mixed batch that comes from history
    grace_s           how long after `complete` a call that was still running may join
    tombstones        consumed and dropped trajectories remembered, against late retries
    replies_kept      hand-outs without a lease that are remembered by `request_id` for up to ten minutes, of each
                      consumer (what stands before the last slash of an id), so that a lost answer can be asked for
                      again; those of the last minute and a half all are. 0: none is
    """

    max_queue_size: int = 100_000
    overflow: Overflow = "drop_oldest"
    n_rollouts: int = 1
    require_reward: bool = False
    group_timeout_s: float | None = None
    on_timeout: OnTimeout = "drop"
    max_staleness: int | None = None
    history_size: int = 0
    replay_share: float = 0.5
    grace_s: float = 0.0
    tombstones: int = 200_000
    replies_kept: int = 4
    by_owner: bool = False

    def __post_init__(self) -> None:
        _check(self, "max_queue_size", int, 1)
        _check(self, "n_rollouts", int, 1)
        _check(self, "group_timeout_s", float, 0, above=True, optional=True)
        _check(self, "max_staleness", int, 0, optional=True)
        _check(self, "history_size", int, 0)
        _check(self, "grace_s", float, 0)
        _check(self, "tombstones", int, 0)
        _check(self, "replies_kept", int, 0)
        _check(self, "replay_share", float, 0)
        if self.replay_share >= 1:
            raise InvalidInput(f"replay_share is {self.replay_share}; it must be at least 0 and below 1, such as 0.25")
        for name in ("require_reward", "by_owner"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name} must be true or false, not {shown(getattr(self, name))}")
        choice(self.overflow, Overflow, "overflow")
        choice(self.on_timeout, OnTimeout, "on_timeout")

    def changed(self, options: dict[str, Any]) -> ChannelConfig:
        """These options with some changed; `InvalidInput` for one that is unknown or could not work."""
        for name in options:
            if name not in self.__struct_fields__:
                near = difflib.get_close_matches(name, self.__struct_fields__, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.__struct_fields__)}"
                raise InvalidInput(f"unknown channel option {name!r}; {hint}")
        return msgspec.structs.replace(self, **options)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one call may bring in, and on what a pool keeps for readers.

    desk_memory_mb    scored groups kept in memory; the newest beyond that wait in scratch files
    max_channels      channels that a pool may have: one stays once it was begun. A journal with more opens, and takes
                      no other
    memory_mb         steps' arrays and blobs kept in memory by a pool with a journal, `DEFAULT_MEMORY_MB` without one
                      given; the newest beyond that are read from the journal when they are needed
    """

    max_step_tokens: int = 4_000_000
    max_trajectory_steps: int = 100_000
    max_submit_steps: int = 16_384
    max_submit_mb: float = 512.0
    events_kept: int = 10_000
    desk_memory_mb: float = 1024.0
    max_channels: int = 10_000
    memory_mb: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_trajectory_steps", "max_submit_steps", "events_kept", "max_channels"):
            _check(self, name, int, 1)
        _check(self, "max_submit_mb", float, 0, above=True)
        _check(self, "desk_memory_mb", float, 0)
        _check(self, "memory_mb", float, 0, optional=True)


def _check(config: Any, name: str, kind: type, least: float, *, above: bool = False, optional: bool = False) -> None:
    value = getattr(config, name)
    if optional and value is None:
        return
    right = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not right or not (value > least if above else value >= least) or value != value or value == float("inf"):
        bound = f"above {least}" if above else f"of at least {least}"
        also = ", or none" if optional else ""
        raise InvalidInput(
            f"{name} must be {'a number' if kind is float else 'an integer'} {bound}{also}, not {shown(value)}"
        )
    if isinstance(value, int) and value > MAX_OPTION:
        raise InvalidInput(f"{name} must be at most {MAX_OPTION}, not {shown(value)}")


def choice(value: Any, options: Any, name: str) -> None:
    """`InvalidInput` where the value is none of the options of a `Literal`."""
    if value not in get_args(options):
        raise InvalidInput(f"{name} is {shown(value)}; it must be one of {', '.join(get_args(options))}")


def lease_seconds(lease_s: Any) -> float:
    """The seconds that a lease is asked for; `InvalidInput` where none could last so long."""
    seconds = check_finite(lease_s, "lease_s")
    if not 0 < seconds < 1e9:
        raise InvalidInput(f"lease_s must be a number of seconds above 0 and below 1e9, not {shown(lease_s)}")
    return seconds
