"""Operations of producers beside a submit: trajectories are announced, and end: complete, or failed."""

from __future__ import annotations

from typing import Any

from headrace.data.block import StepExtra, pack_extra
from headrace.data.step import check_bool, check_count, check_dict, check_finite, check_uid
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import Conflict, PoolClosed
from headrace.pool.groups import DIGEST, FAILED, OPEN
from headrace.pool.operation import Change, Completion, Plan
from headrace.pool.operations.score import rewarded
from headrace.pool.operations.submit import check_room
from headrace.pool.state import State
from headrace.pool.views import unpack_metadata

#: Characters of the reason why a trajectory failed: it is kept as long as its tombstone.
MAX_REASON_CHARACTERS = 2000


class _Open(Change[None], frozen=True):
    trajectory_uid: str
    prompt_uid: str | None = None
    channel: str = DEFAULT_CHANNEL
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None


class OpenTrajectory(_Open, frozen=True, kw_only=True):
    """Announces a trajectory before its first step; again, it adds metadata, or moves one that has no step yet to
    another group; with `move`, also out of any other channel. With `keep`, metadata that is there stays: another value
    for it is a `Conflict`."""

    name = "open"

    move: bool = False
    keep: bool = False

    def plan(self, state: State, now: float) -> Plan:
        uid, channel = self.trajectory_uid, state.look(self.channel)
        known = channel.trajectories.get(uid)
        left = self._elsewhere(state) if self.move and known is None else None
        if left is not None:
            known = left.trajectories[uid]
            if len(known.tree) or known.last != OPEN:
                raise Conflict(f"trajectory {uid!r} has steps in channel {left.name!r}; it cannot move")
        prompt = check_uid(self.prompt_uid or (known.group.uid if known is not None else uid), "prompt_uid")
        n_rollouts = self.n_rollouts if self.n_rollouts is None else check_count(self.n_rollouts, "n_rollouts", 1)
        metadata = self.metadata if self.metadata is not None else {}
        check_dict(metadata, "metadata")
        if channel.closed:
            raise PoolClosed(f"channel {self.channel!r} was shut down")
        if uid in channel.tombstones:
            raise Conflict(f"trajectory {uid!r} is {channel.tombstones[uid].reason}: open another")
        if known is not None and known.group.uid != prompt and (len(known.tree) or known.last != OPEN):
            raise Conflict(f"trajectory {uid!r} has steps in group {known.group.uid!r}; it cannot move to {prompt!r}")
        if known is None or known.group.uid != prompt or left is not None:
            check_room(channel, prompt)
        if known is not None:
            before = unpack_metadata(known.metadata)
            changed = [key for key in metadata if key in before and metadata[key] != before[key]] if self.keep else []
            if changed:
                raise Conflict(f"trajectory {uid!r} has a {changed[0]!r} in its metadata, which stays as it is")
            metadata = {**before, **metadata}
            n_rollouts = n_rollouts or known.n_rollouts
        packed = pack_extra(StepExtra(metadata)) if metadata else b""
        group = channel.open_groups.get(prompt)
        number = group.seq if group is not None else channel.next_seq
        opened = f.Opened(self.channel, now, uid, prompt, packed, n_rollouts, number)
        return Plan([opened] if left is None else [f.Forgotten(left.name, now, uid), opened])

    def _elsewhere(self, state: State) -> Channel | None:
        """Another channel that holds the trajectory."""
        names = state.known_in.names(self.trajectory_uid)
        others = (state.channels[name] for name in names if name != self.channel)
        return next((channel for channel in others if self.trajectory_uid in channel.trajectories), None)


class MarkComplete(Change[Completion], frozen=True):
    """Ends a trajectory, with a reward for its last step where one is given; a person's reward that is there stays. One
    with fewer than `min_steps` steps stays open."""

    name = "complete"
    any_channel = True

    trajectory_uid: str
    reward: float | None = None
    channel: str | None = None
    min_steps: int = 0

    def plan(self, state: State, now: float) -> Plan:
        uid = self.trajectory_uid
        reward = self.reward if self.reward is None else check_finite(self.reward, "reward")
        channel, known = state.find(uid, self.channel)
        late: list[f.Fact] = [f.LateReward(channel.name, now, uid, reward)] if reward is not None else []
        if known is None:
            if uid not in channel.tombstones:
                return Plan(reply=Completion("unknown"))
            return Plan(late, reply=Completion("late"))
        steps = len(known.tree)
        if known.group.lease:
            return Plan(late, reply=Completion("late", steps))
        if steps < check_count(self.min_steps, "min_steps"):
            return Plan(reply=Completion("too_few", steps))
        last = max(known.tree.records, default=-1)
        in_time = reward is None or (last >= 0 and not known.handed_out(last))
        facts: list[f.Fact] = []
        if reward is not None:  # where no step can take it: not silently
            facts += rewarded(channel, known, last, reward, now) if in_time else late
        if known.last != last:
            facts.append(f.Completed(channel.name, now, uid, last))
        return Plan(facts, reply=Completion("ok" if in_time or last < 0 else "late", steps))


class MarkCompleteInTime(Change[bool], frozen=True):
    """`complete` for those who only ask whether it was in time: true, or false where unknown, late or too short."""

    name = MarkComplete.name
    any_channel = True

    trajectory_uid: str
    reward: float | None = None
    channel: str | None = DEFAULT_CHANNEL
    min_steps: int = 0

    def plan(self, state: State, now: float) -> Plan:
        return MarkComplete(self.trajectory_uid, self.reward, self.channel, self.min_steps).plan(state, now)

    def result(self, caller: Any, answer: Completion) -> bool:
        return answer.status == "ok"


class _Fail(Change[Completion], frozen=True):
    trajectory_uid: str
    reason: str
    channel: str | None = None


class FailTrajectory(_Fail, frozen=True, kw_only=True):
    """Ends a trajectory that failed, with the reason; again, it changes nothing and answers the same.

    Its steps are dropped as `failed`, its group waits for another rollout in its place, and what still comes of it is
    late. `"late"` where it is complete, or its group is with a consumer or gone: then nothing is changed. With
    `quarantine` its steps count as quarantined, and a complete trajectory fails too as long as it has no reward: it is
    the reward that failed.
    """

    name = "fail"
    any_channel = True

    quarantine: bool = False

    def plan(self, state: State, now: float) -> Plan:
        uid, reason = self.trajectory_uid, check_uid(self.reason, "reason", MAX_REASON_CHARACTERS)
        check_bool(self.quarantine, "quarantine")
        channel, known = state.find(uid, self.channel)
        if known is None:
            tomb = channel.tombstones.get(uid)
            if tomb is None:
                return Plan(reply=Completion("unknown"))
            failed = channel.failed.get(uid)
            if failed is not None:
                return Plan(reply=Completion("ok", failed.steps))
            return Plan(reply=Completion("ok" if tomb.reason == FAILED else "late", len(tomb.digests) // DIGEST))
        steps = len(known.tree)
        ended = known.last != OPEN and (known.rewarded or not self.quarantine)
        if known.group.lease or ended:
            return Plan(reply=Completion("late", steps))
        return Plan([f.Failed(channel.name, now, uid, reason, self.quarantine)], reply=Completion("ok", steps))
