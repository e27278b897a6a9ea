"""Bugs that the pool does not have, each put into its real code for as long as a test: a simulation has to find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from headrace.pool.channel import Channel
from headrace.pool.channel_index import ChannelIndex
from headrace.pool.embedded import DataPool
from headrace.pool.groups import TrajectoryState
from headrace.pool.journal.journal import Journal
from headrace.pool.journal.records import Captured
from headrace.pool.journaled import JournaledState
from headrace.pool.operations import consume


def leave_out_the_fsync(patch: pytest.MonkeyPatch) -> None:
    """The journal takes what the kernel has for what the disk has."""

    def sync(self: Journal) -> None:
        self._check()
        self._synced = self._written

    patch.setattr(Journal, "_sync", sync)


def answer_before_the_write(patch: pytest.MonkeyPatch) -> None:
    """A call is answered while what it wrote is on its way to the disk."""
    made_safe = DataPool._made_safe

    def at_once(self: DataPool, loop: asyncio.AbstractEventLoop, serial: int) -> asyncio.Future[None]:
        made_safe(self, loop, serial)
        done: asyncio.Future[None] = loop.create_future()
        done.set_result(None)
        return done

    patch.setattr(DataPool, "_made_safe", at_once)


def accept_stale_leases(patch: pytest.MonkeyPatch) -> None:
    """Whoever acknowledges a lease is believed, also after it expired and its groups went to somebody else."""
    patch.setattr(consume, "_check_lease", lambda state, channel, lease_id: None)


def number_leases_anew(patch: pytest.MonkeyPatch) -> None:
    """A restarted pool gives leases the names of earlier ones."""
    patch.setattr(Channel, "count_lease", lambda self, id: None)
    hand_out = Channel.hand_out

    def count(self: Channel, lease: Any, leased: bool) -> None:
        hand_out(self, lease, leased)
        self.next_lease += leased and self.next_lease == int(lease.id.rpartition("-")[2])

    patch.setattr(Channel, "hand_out", count)
    _after_recovery(patch, lambda channel: setattr(channel, "next_lease", 0))


def drop_tombstones(patch: pytest.MonkeyPatch) -> None:
    """What was consumed is forgotten altogether: a retry that comes late is taken for something new."""
    leave = ChannelIndex._leave_tombstone

    def leave_some(self: ChannelIndex, trajectory: TrajectoryState, reason: str) -> None:
        if reason != "consumed":
            leave(self, trajectory, reason)

    patch.setattr(ChannelIndex, "_leave_tombstone", leave_some)


def forget_call_names_over_restarts(patch: pytest.MonkeyPatch) -> None:
    """A call that is retried after a restart is not known any more, and makes a second step."""

    def forget(channel: Channel) -> None:
        for trajectory in channel.trajectories.values():
            trajectory.calls = None

    _after_recovery(patch, forget)


def forget_hand_outs_over_restarts(patch: pytest.MonkeyPatch) -> None:
    """A consumer without a lease that asks again for a lost answer is given other groups."""
    _after_recovery(patch, lambda channel: channel.replies.clear())


def compact_what_was_written_meanwhile_away(patch: pytest.MonkeyPatch) -> None:
    """A snapshot takes the place of all that was written until it is finished, and not until it was begun."""
    write = Journal.write_snapshot

    def write_late(self: Journal, number: int, first_serial: int, captured: Sequence[Captured]) -> None:
        newer = self.rotate(spare=True)
        write(self, newer, self.serial, captured)

    patch.setattr(Journal, "write_snapshot", write_late)


def _after_recovery(patch: pytest.MonkeyPatch, spoil: Callable[[Channel], object]) -> None:
    recover = JournaledState._recover

    def spoilt(self: JournaledState, journal: Journal) -> None:
        recover(self, journal)
        for channel in self._state.channels.values():
            spoil(channel)

    patch.setattr(JournaledState, "_recover", spoilt)


#: The bugs, with the kinds of findings of which each shows at least one.
BUGS: dict[Callable[[pytest.MonkeyPatch], None], set[str]] = {
    leave_out_the_fsync: {"lost", "refused", "ledger", "stuck"},
    answer_before_the_write: {"lost", "refused", "ledger", "stuck"},
    accept_stale_leases: {"after_ack"},
    number_leases_anew: {"after_ack", "lost", "ledger"},
    drop_tombstones: {"after_ack", "refused"},
    forget_call_names_over_restarts: {"twice"},
    forget_hand_outs_over_restarts: {"lost"},
    compact_what_was_written_meanwhile_away: {"lost", "ledger", "refused", "stuck", "after_ack", "versions"},
}
