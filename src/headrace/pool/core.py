"""The pure core: every call on a pool as a plan over its state. No I/O, no threads, no clock of its own.

A shell (embedded, and through it Ray and HTTP) runs each call as

    for fact in core.due(channel, now): write it, apply it
    plan = core.plan_...(now); write its facts; apply them
    for fact in core.due(channel, now): write it, apply it

and answers with the plan's reply. A plan reads; only `State.apply` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.data.block import Block, StepExtra, pack_extra
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import (
    INT32_MAX,
    check_count,
    check_dict,
    check_finite,
    check_tags,
    check_uid,
)
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import Order, Unit, choice
from headrace.pool.entities import OPEN, Lease, TrajectoryState
from headrace.pool.errors import Conflict, LeaseLost, NotFound, PoolClosed
from headrace.pool.intake import check_indices, check_room, check_size, plan_submit
from headrace.pool.plan import Completion, MustWait, Plan
from headrace.pool.policies import expiry, order
from headrace.pool.scored.transfer import into_channel
from headrace.pool.state import State
from headrace.pool.views import HandOut, group_view, step_views, unpack_metadata


class Core:
    def __init__(self, state: State) -> None:
        self.state = state

    # -- time ----------------------------------------------------------------------------------------------------------

    def due(self, channel_name: str, now: float) -> Iterator[f.Fact]:
        """Facts that the clock, the version or the capacity call for; each is applied before the next is asked for."""
        channel = self.state.channels.get(channel_name)
        if channel is None:
            return
        if channel.grace_deadlines:
            expiry.end_graces(channel, now)
        while fact := expiry.next_due(channel, now):
            yield fact

    # -- producers -----------------------------------------------------------------------------------------------------

    def submit(self, channel: str, block: Block, now: float) -> Plan:
        check_size(block, self.state.limits)
        plan = plan_submit(self.state.look(channel), block, now, self.state.holds_blob)
        check_indices(plan.reply.indices, self.state.limits)
        return plan

    def open(
        self,
        channel: str,
        trajectory: str,
        prompt: str | None,
        metadata: dict[str, Any] | None,
        n_rollouts: int | None,
        now: float,
        *,
        move: bool = False,
        keep: bool = False,
    ) -> Plan:
        check_uid(trajectory, "trajectory_uid")
        known = self.state.look(channel).trajectories.get(trajectory)
        left = self._elsewhere(trajectory, channel) if move and known is None else None
        if left is not None:
            known = left.trajectories[trajectory]
            if len(known.tree) or known.last != OPEN:
                raise Conflict(f"trajectory {trajectory!r} has steps in channel {left.name!r}; it cannot move")
        prompt = check_uid(prompt or (known.group.uid if known is not None else trajectory), "prompt_uid")
        if n_rollouts is not None:
            n_rollouts = check_count(n_rollouts, "n_rollouts", 1)
        metadata = metadata if metadata is not None else {}
        check_dict(metadata, "metadata")
        there = self.state.look(channel)
        if there.closed:
            raise PoolClosed(f"channel {channel!r} was shut down")
        if trajectory in there.tombs:
            raise Conflict(f"trajectory {trajectory!r} is {there.tombs[trajectory].reason}: open another")
        if known is not None and known.group.uid != prompt and (len(known.tree) or known.last != OPEN):
            raise Conflict(
                f"trajectory {trajectory!r} has steps in group {known.group.uid!r}; it cannot move to {prompt!r}"
            )
        if known is None or known.group.uid != prompt or left is not None:
            check_room(there, prompt)
        if known is not None:
            before = unpack_metadata(known.metadata)
            changed = [name for name in metadata if name in before and metadata[name] != before[name]] if keep else []
            if changed:
                raise Conflict(f"trajectory {trajectory!r} has a {changed[0]!r} in its metadata, which stays as it is")
            metadata = {**before, **metadata}
            n_rollouts = n_rollouts or known.n_rollouts
        packed = pack_extra(StepExtra(metadata)) if metadata else b""
        group = there.open_groups.get(prompt)
        seat = group.seq if group is not None else there.next_seq
        opened = f.Opened(channel, now, trajectory, prompt, packed, n_rollouts, seat)
        return Plan([opened] if left is None else [f.Forgotten(left.name, now, trajectory), opened])

    def _elsewhere(self, trajectory: str, channel: str) -> Channel | None:
        """Another channel that holds the trajectory."""
        others = (there for name, there in self.state.channels.items() if name != channel)
        return next((there for there in others if trajectory in there.trajectories), None)

    def reward(self, channel: str | None, trajectory: str, reward: float, index: int | None, now: float) -> Plan:
        """Sets the reward of a step, or of the last one."""
        reward = check_finite(reward, "reward")
        there, known = self._find(trajectory, channel)
        if known is None and trajectory not in there.tombs:
            raise NotFound(f"no trajectory {trajectory!r} in channel {there.name!r}")
        late = Plan([f.LateReward(there.name, now, trajectory, reward)], reply="late")
        if known is None or known.group.lease:
            return late
        at = max(known.tree.records, default=-1) if index is None else check_count(index, "step_index")
        if at not in known.tree.records:
            raise NotFound(f"trajectory {trajectory!r} has no step {at if index is not None else 'yet'} to reward")
        if known.handed_out(at):
            return late
        return Plan([f.Amended(there.name, now, trajectory, at, reward)], reply="ok")

    def complete(self, channel: str | None, trajectory: str, reward: float | None, now: float) -> Plan:
        if reward is not None:
            reward = check_finite(reward, "reward")
        there, known = self._find(trajectory, channel)
        if known is None:
            tomb = there.tombs.get(trajectory)
            late = (
                [f.LateReward(there.name, now, trajectory, reward)] if tomb is not None and reward is not None else []
            )
            return Plan(late, reply=Completion("late" if tomb is not None else "unknown"))
        steps = len(known.tree)
        if known.group.lease:
            late = [f.LateReward(there.name, now, trajectory, reward)] if reward is not None else []
            return Plan(late, reply=Completion("late", steps))
        last = max(known.tree.records, default=-1)
        facts: list[f.Fact] = []
        in_time = reward is None or (last >= 0 and not known.handed_out(last))
        if reward is not None and in_time:
            facts.append(f.Amended(there.name, now, trajectory, last, reward))
        elif reward is not None:  # no step can take it: not silently
            facts.append(f.LateReward(there.name, now, trajectory, reward))
        if known.last != last:
            facts.append(f.Completed(there.name, now, trajectory, last))
        return Plan(facts, reply=Completion("ok" if in_time or last < 0 else "late", steps))

    # -- consumers -----------------------------------------------------------------------------------------------------

    def fetch(
        self,
        channel: str,
        size: int,
        now: float,
        *,
        n_rollouts: int | None = None,
        order_: str = "fifo",
        max_staleness: int | None = None,
        lease_s: float | None = None,
        request: str = "",
        unit: str = "group",
    ) -> Plan:
        """A batch, `MustWait` where too little is there, or a reply of None where a closed channel has nothing left."""
        check_fetch(size, n_rollouts, order_, max_staleness, unit)
        lease_s = None if lease_s is None else check_lease(lease_s)
        there = self.state.look(channel)
        if request and request in there.replies:
            return Plan(reply=self._view(there, there.replies[request]))
        if max_staleness is not None:
            stale = expiry.stale(there, now, max_staleness)
            if stale is not None:
                return Plan([stale], again=True)
        lease = f"{channel}-{there.next_lease}" if lease_s is not None else ""
        deadline = now + lease_s if lease_s is not None else 0.0
        if unit == "step":
            wanted = size - len(there.offered())
            picked = self._pick_steps(there, size, now, order_, lease, deadline, request)
        else:
            fresh, replayed = order.pick(there, size, n_rollouts, order_, max_staleness)
            picked = self._pick_groups(there, size, now, fresh, replayed, lease, deadline, request)
            wanted = size - len(fresh) - len(replayed)
        if picked is None and self.state.scored.serving == channel:
            picked = into_channel(self.state, there, wanted, unit, now)
        if picked is None:
            if there.closed:
                return Plan(reply=None)
            raise MustWait
        return picked

    def _pick_groups(
        self,
        there: Channel,
        size: int,
        now: float,
        fresh: list[int],
        replayed: list[int],
        lease: str,
        deadline: float,
        request: str,
    ) -> Plan | None:
        if len(fresh) + len(replayed) < size and not (there.closed and fresh):
            return None
        groups = [there.groups[seq] for seq in fresh]
        left = tuple(
            uid
            for group in groups
            if len(group.trajectories) > len(group.ripe) or len(group.ripe) > there.need(group)
            for uid in order.surplus(there, group)
        )
        given = Lease(lease, deadline, request)
        given.groups, given.replayed = groups, [there.history[seq] for seq in replayed]
        fact = f.HandedOut(there.name, now, tuple(fresh), left, tuple(replayed), lease, deadline, request)
        return Plan([fact], after=lambda: self._view(there, given))

    def _pick_steps(
        self, there: Channel, size: int, now: float, order_: str, lease: str, deadline: float, request: str
    ) -> Plan | None:
        offered = there.offered()
        if len(offered) < size and not (there.closed and offered):
            return None
        entries = list(offered[-size:])[::-1] if order_ == "latest" else list(offered[:size])
        given = Lease(lease, deadline, request)
        given.steps = [(there.trajectories[uid], index) for _, _, uid, index in entries]
        steps = tuple((uid, index) for _, _, uid, index in entries)
        return Plan(
            [f.StepsHandedOut(there.name, now, steps, lease, deadline, request)], after=lambda: self._view(there, given)
        )

    def _view(self, there: Channel, given: Lease) -> HandOut:
        views = [group_view(there, group, replayed=False) for group in given.groups]
        views += [group_view(there, group, replayed=True) for group in given.replayed]
        if given.steps:
            views += step_views(there, given.steps)
        return HandOut(there.name, given.id, given.deadline, views)

    def ack(self, channel: str, lease: str, now: float) -> Plan:
        if lease in self.state.look(channel).acked:
            return Plan()
        self._lease(channel, lease)
        return Plan([f.Acked(channel, now, lease)])

    def nack(self, channel: str, lease: str, now: float) -> Plan:
        self._lease(channel, lease)
        return Plan([f.Returned(channel, now, lease, "nack")])

    def extend(self, channel: str, lease: str, lease_s: float, now: float) -> Plan:
        lease_s = check_lease(lease_s)
        self._lease(channel, lease)
        return Plan([f.Extended(channel, now, lease, now + lease_s)], reply=now + lease_s)

    def _lease(self, channel: str, lease: str) -> Lease:
        found = self.state.look(channel).leases.get(lease)
        if found is None:
            raise LeaseLost(
                f"no lease {lease!r} in channel {channel!r}: it expired or was ended; "
                "its groups may be with another consumer"
            )
        return found

    # -- control -------------------------------------------------------------------------------------------------------

    def configure(self, channel: str, options: dict[str, Any], now: float) -> Plan:
        check_uid(channel, "channel")
        config = self.state.look(channel).config.changed(options)
        return Plan([f.Configured(channel, now, config)], reply=config)

    def set_version(self, version: int, channel: str | None, now: float) -> Plan:
        version = check_count(version, "version", most=INT32_MAX)
        names = [channel] if channel is not None else list(self.state.channels) or ["train"]
        for name in names:
            current = self.state.look(name).version
            if version < current:
                raise InvalidInput(f"version {version} is below {current} of channel {name!r}; versions only rise")
        return Plan([f.Versioned(name, now, version, channel is None) for name in names])

    def set_closed(self, closed: bool, channel: str | None, now: float) -> Plan:
        """Shuts a channel down, or opens it again; without a name, all of them and those yet to come."""
        names = [channel] if channel is not None else list(self.state.channels) or ["train"]
        everywhere = channel is None
        concerned = [name for name in names if self.state.look(name).closed != closed]
        if everywhere and self.state.closed != closed:
            concerned = names
        return Plan([f.Closed(name, now, closed, everywhere) for name in concerned])

    def curate(self, channel: str | None, trajectory: str, index: int, changes: dict[str, Any], now: float) -> Plan:
        """Sets what people decided about a step: `quality`, `trainable`, `tags`, `note`."""
        index = check_count(index, "step_index")
        there, known = self._find(trajectory, channel)
        if known is None or index not in known.tree.records:
            raise NotFound(f"no step {index} of trajectory {trajectory!r} in channel {there.name!r} to curate")
        if known.handed_out(index):
            raise Conflict(f"trajectory {trajectory!r} is with a consumer; it can be curated until then")
        extra = known.tree.records[index].head.unpack_extra()
        for name, value in changes.items():
            setattr(extra, name, check_curation(name, value))
        return Plan([f.Amended(there.name, now, trajectory, index, extra=pack_extra(extra))])

    def forget(self, trajectory: str, channel: str | None, now: float) -> Plan:
        names = [channel] if channel is not None else list(self.state.channels)
        found = [n for n in names if self._holds(self.state.look(n), trajectory)]
        return Plan([f.Forgotten(name, now, trajectory) for name in found], reply=bool(found))

    @staticmethod
    def _holds(channel: Channel, trajectory: str) -> bool:
        return (
            trajectory in channel.trajectories
            or (trajectory in channel.tombs and channel.tombs[trajectory].reason != "forgotten")
            or any(trajectory in group.trajectories for group in channel.history.values())
            or any(kept.holds(trajectory) for kept in (*channel.replies.values(), *channel.leases.values()))
        )

    def _find(self, trajectory: str, channel: str | None) -> tuple[Channel, TrajectoryState | None]:
        """The trajectory and its channel; without a channel's name, the one that knows it."""
        if channel is None:
            for candidate in self.state.channels.values():
                if trajectory in candidate.trajectories:
                    return candidate, candidate.trajectories[trajectory]
            for candidate in self.state.channels.values():
                if trajectory in candidate.tombs:
                    return candidate, None
        there = self.state.look(channel or "train")
        return there, there.trajectories.get(trajectory)


def check_curation(name: str, value: Any) -> Any:
    if name == "trainable" and type(value) is bool:
        return value
    if name == "quality" and (value is None or isinstance(value, int | float)):
        return value if value is None else check_finite(value, "quality")
    if name == "note" and (value is None or isinstance(value, str)):
        return value
    if name == "tags":
        return check_tags(value)
    raise InvalidInput(
        f"{name} = {shown(value)}: curation takes trainable (bool), quality (number), tags (strings), note (string)"
    )


def check_lease(lease_s: Any) -> float:
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not 0 < lease_s < 1e9:
        raise InvalidInput(f"lease_s must be a number of seconds above 0, not {shown(lease_s)}")
    return float(lease_s)


def check_fetch(size: int, n_rollouts: int | None, order_: str, max_staleness: int | None, unit: str) -> None:
    check_count(size, "batch_size", 1)
    if n_rollouts is not None:
        check_count(n_rollouts, "n_rollouts", 1)
    if max_staleness is not None:
        check_count(max_staleness, "max_staleness")
    choice(order_, Order, "order")
    choice(unit, Unit, "unit")
