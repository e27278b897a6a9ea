"""Which channels know a trajectory: so that a call that names no channel costs the same however many there are."""

from __future__ import annotations

from typing import Protocol


class NumberedChannel(Protocol):
    """A channel; `number` tells in which order a pool's channels were begun."""

    name: str
    number: int


class TrajectoryChannels:
    """By a trajectory's uid, the channels that hold it or its tombstone: one as a rule, and then no more than an entry
    of a dict."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, NumberedChannel | tuple[NumberedChannel, ...]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, uid: str, channel: NumberedChannel) -> None:
        """A channel has come to know a trajectory; nothing where it did."""
        found = self._known.setdefault(uid, channel)
        if found is not channel:
            others = found if isinstance(found, tuple) else (found,)
            if channel not in others:
                self._known[uid] = tuple(sorted((*others, channel), key=lambda each: each.number))

    def discard(self, uid: str, channel: NumberedChannel) -> None:
        """A channel knows a trajectory no longer."""
        found = self._known.get(uid)
        if found is channel:
            del self._known[uid]
        elif isinstance(found, tuple):
            left = tuple(each for each in found if each is not channel)
            self._known[uid] = left if len(left) > 1 else left[0]

    def names(self, uid: str) -> list[str]:
        """The names of the channels that know a trajectory, in the order in which these were begun."""
        found = self._known.get(uid, ())
        return [each.name for each in (found if isinstance(found, tuple) else (found,))]

    def clear(self) -> None:
        self._known.clear()
