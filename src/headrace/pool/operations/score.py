"""Operations of whoever scores: rewards of steps and trajectories, and what still waits for one.

A reward may say who it is from (`source`) and what it was made of (`info`); both stand in the step's metadata, as
`reward_source` and `reward_extra_info`, and go when another reward takes its place. A person's reward (the source
`person`) is replaced by a person's only: any other that comes later is answered `"kept"`.
"""

from __future__ import annotations

from typing import Any

from headrace.data.block import StepHead, pack_extra
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import REWARD_INFO, REWARD_SOURCE, check_bool, check_count, check_dict, check_finite, check_uid
from headrace.pool import facts as f
from headrace.pool.channel import Channel
from headrace.pool.config import DEFAULT_CHANNEL
from headrace.pool.errors import NotFound
from headrace.pool.groups import PERSON, TrajectoryState, is_persons_reward
from headrace.pool.operation import Change, MustWait, Plan
from headrace.pool.state import State

#: Characters of a reward's source: a word, such as `model` or `person`, kept in every step that it rewarded.
MAX_SOURCE_CHARACTERS = 64
#: Rows that one page may have: a reward loop that asks for more than it can score at once holds the lock for nothing.
MAX_UNSCORED = 10_000
_ABOUT = (REWARD_SOURCE.encode(), REWARD_INFO.encode())


class _Reward(Change[str], frozen=True):
    trajectory_uid: str
    reward: float
    step_index: int | None = None
    channel: str | None = None


class SetReward(_Reward, frozen=True, kw_only=True):
    """Sets the reward of a step, or of the last: `"ok"`, `"late"` once the group is handed out, or `"kept"` where a
    person's stands. `source` says who it is from, `info` what it was made of: both are kept in the step's metadata."""

    name = "reward"
    any_channel = True

    source: str | None = None
    info: dict[str, Any] | None = None

    def plan(self, state: State, now: float) -> Plan:
        uid, reward = self.trajectory_uid, check_finite(self.reward, "reward")
        _check_about(self.source, self.info)
        channel, known = _found(state, uid, self.channel)
        late = Plan([f.LateReward(channel.name, now, uid, reward)], reply="late")
        if known is None or known.group.lease:
            return late
        last = max(known.tree.records, default=-1)
        at = last if self.step_index is None else check_count(self.step_index, "step_index")
        if at not in known.tree.records:
            missing = at if self.step_index is not None else "yet"
            raise NotFound(f"trajectory {uid!r} has no step {missing} to reward")
        if known.handed_out(at):
            return late
        facts = rewarded(channel, known, at, reward, now, self.source, self.info)
        return Plan(facts, reply="ok" if facts else "kept")


class _Rewards(Change[dict[int, str]], frozen=True):
    trajectory_uid: str
    rewards: dict[int, float]
    channel: str | None = None


class SetStepRewards(_Rewards, frozen=True, kw_only=True):
    """Sets the rewards of several steps of a trajectory at once, by step index: all of them, or none where a step is
    not there. Answers what `reward` would, by step. `info` is by step too: `{0: {...}, 3: {...}}`."""

    name = "reward_steps"
    any_channel = True

    source: str | None = None
    info: dict[int, dict[str, Any]] | None = None

    def plan(self, state: State, now: float) -> Plan:
        uid, rewards = self.trajectory_uid, _by_step(self.rewards, "rewards")
        info = _by_step(self.info or {}, "info")
        if not rewards:
            raise InvalidInput("rewards is empty; give a reward by step index, such as {0: 0.3, 1: 0.7}")
        for index in info.keys() - rewards.keys():
            raise InvalidInput(f"info speaks of step {index}, which gets no reward here")
        for index, reward in rewards.items():
            rewards[index] = check_finite(reward, f"rewards[{index}]")
            _check_about(self.source, info.get(index))
        channel, known = _found(state, uid, self.channel)
        missing = [index for index in rewards if known is not None and index not in known.tree.records]
        if missing:
            raise NotFound(f"trajectory {uid!r} has no step {missing[0]} to reward; none of the rewards was taken")
        facts: list[f.Fact] = []
        taken: list[tuple[int, float, bytes | None]] = []
        answer: dict[int, str] = {}
        for index, reward in sorted(rewards.items()):
            if known is None or known.handed_out(index):
                facts.append(f.LateReward(channel.name, now, uid, reward))
                answer[index] = "late"
            elif _is_kept(known.tree.records[index].head, self.source):
                answer[index] = "kept"
            else:
                taken.append((index, reward, _extra(known.tree.records[index].head, self.source, info.get(index))))
                answer[index] = "ok"
        if taken:
            facts.append(f.Scored(channel.name, now, uid, tuple(taken)))
        return Plan(facts, reply=answer)


def rewarded(
    channel: Channel,
    trajectory: TrajectoryState,
    index: int,
    reward: float,
    now: float,
    source: str | None = None,
    info: dict[str, Any] | None = None,
) -> list[f.Fact]:
    """What gives a step that is not handed out a reward; nothing where a person's stands."""
    head = trajectory.tree.records[index].head
    if _is_kept(head, source):
        return []
    return [f.Amended(channel.name, now, trajectory.uid, index, reward, extra=_extra(head, source, info))]


def _is_kept(head: StepHead, source: str | None) -> bool:
    """Whether a reward that is there stays where one of this source comes."""
    return source != PERSON and is_persons_reward(head)


def _extra(head: StepHead, source: str | None, info: dict[str, Any] | None) -> bytes | None:
    """A step's extra with what a new reward says of itself and nothing of the one before; None where it stays."""
    told = {name: value for name, value in ((REWARD_SOURCE, source), (REWARD_INFO, info)) if value}
    if not told and not any(name in head.extra for name in _ABOUT):
        return None
    extra = head.unpack_extra()
    others = {name: value for name, value in extra.metadata.items() if name not in (REWARD_SOURCE, REWARD_INFO)}
    extra.metadata = {**others, **told}
    return pack_extra(extra)


def _found(state: State, uid: str, name: str | None) -> tuple[Channel, TrajectoryState | None]:
    """The trajectory and its channel, None for one that is gone; `NotFound` where it was never there."""
    channel, known = state.find(uid, name)
    if known is None and uid not in channel.tombstones:
        raise NotFound(f"no trajectory {uid!r} in channel {channel.name!r}")
    return channel, known


def _by_step(given: Any, field: str) -> dict[int, Any]:
    if not isinstance(given, dict):
        raise InvalidInput(f"{field} must be a dict by step index, such as {{0: ...}}, not {shown(given)}")
    return {check_count(index, f"a step index of {field}"): value for index, value in given.items()}


def _check_about(source: str | None, info: dict[str, Any] | None) -> None:
    if source is not None:
        check_uid(source, "source", MAX_SOURCE_CHARACTERS)
    if info is not None:
        check_dict(info, "info")


class ListUnscored(Change[dict[str, Any]], frozen=True, kw_only=True):
    """A page of what waits for a reward; see `unscored`. It changes nothing, but it can wait."""

    name = "unscored"
    waits = True

    channel: str = DEFAULT_CHANNEL
    limit: int = 100
    after: str | None = None
    by_step: bool = False
    timeout: float = 0.0

    def plan(self, state: State, now: float) -> Plan:
        limit = check_count(self.limit, "limit", 1, MAX_UNSCORED)
        check_bool(self.by_step, "steps")
        if self.after is not None and not isinstance(self.after, str):
            raise InvalidInput(f"after is {shown(self.after)}; give the `next` of the page before, or None")
        channel = state.look(self.channel)
        rows: list[dict[str, Any]]
        if self.by_step:
            steps, after = channel.steps_to_score().page(self.after, limit)
            rows = [{**_row(channel, uid), "step_index": index} for uid, index in steps]
        else:
            uids, after = channel.trajectories_to_score().page(self.after, limit)
            rows = [_row(channel, uid) for uid in uids]
        if not rows and self.timeout:
            raise MustWait
        return Plan(reply={"items": rows, "next": after})

    def gave_up(self) -> dict[str, Any]:
        return {"items": [], "next": self.after}


def _row(channel: Channel, uid: str) -> dict[str, Any]:
    return {"trajectory_uid": uid, "prompt_uid": channel.trajectories[uid].group.uid}


def unscored(
    channel: str = DEFAULT_CHANNEL,
    *,
    limit: int = 100,
    after: str | None = None,
    steps: bool = False,
    wait_s: float = 0.0,
) -> ListUnscored:
    """What waits for a reward, oldest first: `{"items": [{"trajectory_uid", "prompt_uid"}, ...], "next": cursor}`.

    A trajectory waits once it is complete, has no reward on any step, and is with no consumer; with `steps`, every step
    without a reward does, of running trajectories too, as rows with a `step_index`. `after` is the `next` of the page
    before: what it showed is not shown again, except after a restart of the pool. Where nothing waits, the call waits
    up to `wait_s` seconds for something that does. It costs the same however long the channel's queue is.
    """
    return ListUnscored(channel=channel, limit=limit, after=after, by_step=steps, timeout=wait_s)
