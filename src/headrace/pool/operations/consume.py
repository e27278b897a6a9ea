"""Operations of consumers: a batch of groups goes out, and its lease ends with an ack or a nack."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headrace.data.step import check_count
from headrace.pool import facts as f
from headrace.pool import policies
from headrace.pool.batch import Batch
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL, Order, Unit, choice, lease_seconds
from headrace.pool.errors import LeaseLost
from headrace.pool.groups import NACK, Lease
from headrace.pool.operation import Change, MustWait, Plan
from headrace.pool.operations.transfer import into_channel
from headrace.pool.scored.facts import BatchFetched, TrainerRegistered, TrainerStarted
from headrace.pool.scored.groups import ScoredGroups
from headrace.pool.scored.types import MAX_SEQUENCES, Registration
from headrace.pool.state import State
from headrace.pool.views import HandOut, check_loaded, check_steps_loaded, group_view, step_views


class FetchBatch(Change[Batch | None], frozen=True):
    """`batch_size` ready groups (or steps, with `unit="step"`) as a `Batch`; None after `timeout`, or at the end.

    Blocks for ever with `timeout=None`, polls with 0; where too little is there, nothing is consumed. Without
    `lease_s` the groups are consumed when handed out. The same `request_id` gets the same batch again.
    """

    name = "fetch"
    waits = True

    batch_size: int
    n_rollouts: int | None = None
    channel: str = DEFAULT_CHANNEL
    order: str = "fifo"
    max_staleness: int | None = None
    lease_s: float | None = None
    timeout: float | None = None
    request_id: str | None = None
    unit: str = "group"

    def result(self, caller: Any, answer: HandOut | None) -> Batch | None:
        if answer is None:
            return None
        lease = answer.lease or None
        return Batch(answer.groups, answer.channel, lease, answer.deadline if lease else None, caller)

    def plan(self, state: State, now: float) -> Plan:
        """A batch, `MustWait` where too little is there, or a reply of None where a closed channel has nothing left."""
        self._check_options()
        lease_s = self.lease_s if self.lease_s is None else lease_seconds(self.lease_s)
        channel = state.look(self.channel)
        if self.request_id and self.request_id in channel.replies:
            reply = channel.replies[self.request_id]
            _check_loaded(channel, reply)
            return Plan(reply=_handed_out(channel, reply))
        if self.max_staleness is not None:
            stale = policies.stale(channel, now, self.max_staleness)
            if stale is not None:
                return Plan([stale], again=True)
        serving = state.scored.serving == self.channel
        if serving and (begin := self._as_trainer(state.scored, now)):
            return Plan(begin, again=True)
        lease_id = f"{self.channel}-{channel.next_lease}" if lease_s is not None else ""
        lease = Lease(lease_id, now + lease_s if lease_s is not None else 0.0, self.request_id or "")
        if self.unit == "step":
            missing = self.batch_size - len(channel.offered())
            plan = self._take_steps(channel, lease, now)
        else:
            fresh, replayed = policies.pick(channel, self.batch_size, self.n_rollouts, self.order, self.max_staleness)
            missing = self.batch_size - len(fresh) - len(replayed)
            plan = self._take_groups(channel, lease, now, fresh, replayed)
        if plan is not None and serving:
            plan.facts = [*plan.facts, BatchFetched(self.channel, now, lease.id)]
        if plan is None and serving:
            plan = into_channel(state, channel, missing, self.unit, now)
        if plan is None:
            if channel.closed:
                return Plan(reply=None)
            raise MustWait
        return plan

    def _as_trainer(self, scored: ScoredGroups, now: float) -> list[f.Fact]:
        """What lets environments in, where nobody did before: who fetches from the channel that they feed is their
        trainer, and registers by that where it did not in its own words."""
        if scored.registration is None:
            sequences = self.batch_size * (self.n_rollouts or 1) if self.unit == "group" else self.batch_size
            groups = self.batch_size if self.unit == "group" else 1
            most = MAX_SEQUENCES  # a fetch may ask for more than it will ever get; what is written down says no more
            about = Registration("", "", min(sequences, most), -1, "", -1, 0, -1, batch_groups=min(groups, most))
            return [TrainerRegistered("", now, "", about, 0, by_fetch=True), TrainerStarted("", now)]
        return [] if scored.started else [TrainerStarted("", now)]

    def _check_options(self) -> None:
        check_count(self.batch_size, "batch_size", 1)
        if self.n_rollouts is not None:
            check_count(self.n_rollouts, "n_rollouts", 1)
        if self.max_staleness is not None:
            check_count(self.max_staleness, "max_staleness")
        choice(self.order, Order, "order")
        choice(self.unit, Unit, "unit")

    def _take_groups(
        self, channel: Channel, lease: Lease, now: float, fresh: list[int], replayed: list[int]
    ) -> Plan | None:
        if len(fresh) + len(replayed) < self.batch_size and not (channel.closed and fresh):
            return None
        lease.groups = [channel.groups[seq] for seq in fresh]
        lease.replayed = [channel.history[seq] for seq in replayed]
        surplus = tuple(
            uid
            for group in lease.groups
            if len(group.trajectories) > len(group.counted) or len(group.counted) > channel.need(group)
            for uid in policies.surplus(channel, group)
        )
        _check_loaded(channel, lease, set(surplus))
        fact = f.HandedOut(
            channel.name, now, tuple(fresh), surplus, tuple(replayed), lease.id, lease.deadline, lease.request
        )
        return Plan([fact], after=lambda: _handed_out(channel, lease))

    def _take_steps(self, channel: Channel, lease: Lease, now: float) -> Plan | None:
        offered, size = channel.offered(), self.batch_size
        if len(offered) < size and not (channel.closed and offered):
            return None
        entries = list(offered[-size:])[::-1] if self.order == "latest" else list(offered[:size])
        lease.steps = [(channel.trajectories[uid], index) for _, _, uid, index in entries]
        _check_loaded(channel, lease)
        steps = tuple((uid, index) for _, _, uid, index in entries)
        fact = f.StepsHandedOut(channel.name, now, steps, lease.id, lease.deadline, lease.request)
        return Plan([fact], after=lambda: _handed_out(channel, lease))


def _check_loaded(channel: Channel, lease: Lease, left_out: Collection[str] = ()) -> None:
    """`MustLoad` where what a lease hands out is not all in memory, but for the trajectories that are `left_out`."""
    if channel.memory.in_journal:
        groups = (*lease.groups, *lease.replayed)
        check_loaded(t for group in groups for uid, t in group.trajectories.items() if uid not in left_out)
        check_steps_loaded(lease.steps)


def _handed_out(channel: Channel, lease: Lease) -> HandOut:
    views = [group_view(channel, group, replayed=False) for group in lease.groups]
    views += [group_view(channel, group, replayed=True) for group in lease.replayed]
    if lease.steps:
        views += step_views(channel, lease.steps)
    return HandOut(channel.name, lease.id, lease.deadline, views)


class AckLease(Change[None], frozen=True):
    """Ends a lease: its groups were used, and are consumed for good; again, it changes nothing. `LeaseLost` where it
    ended otherwise before."""

    name = "ack"

    lease_id: str
    channel: str = DEFAULT_CHANNEL

    def plan(self, state: State, now: float) -> Plan:
        if self.lease_id in state.look(self.channel).acked:
            return Plan()
        _check_lease(state, self.channel, self.lease_id)
        return Plan([f.Acked(self.channel, now, self.lease_id)])


class NackLease(Change[None], frozen=True):
    """Ends a lease: its groups go back to their old place at once; again, it changes nothing. `LeaseLost` where it
    ended otherwise before."""

    name = "nack"

    lease_id: str
    channel: str = DEFAULT_CHANNEL

    def plan(self, state: State, now: float) -> Plan:
        if self.lease_id in state.look(self.channel).nacked:
            return Plan()
        _check_lease(state, self.channel, self.lease_id)
        return Plan([f.Returned(self.channel, now, self.lease_id, NACK)])


class ExtendLease(Change[float], frozen=True):
    """Has a lease end `lease_s` seconds from now; returns the new deadline. `LeaseLost` where it ended before."""

    name = "extend"

    lease_id: str
    lease_s: float
    channel: str = DEFAULT_CHANNEL

    def plan(self, state: State, now: float) -> Plan:
        deadline = now + lease_seconds(self.lease_s)
        _check_lease(state, self.channel, self.lease_id)
        return Plan([f.Extended(self.channel, now, self.lease_id, deadline)], reply=deadline)


def _check_lease(state: State, channel: str, lease_id: str) -> None:
    if lease_id not in state.look(channel).leases:
        raise LeaseLost(
            f"no lease {lease_id!r} in channel {channel!r}: it expired or was ended; "
            "its groups may be with another consumer"
        )
