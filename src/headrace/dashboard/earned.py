"""What trajectories earned: the parts of their rewards, and the advantages that follow from a group's rewards.

The advantages are those of `headrace.trainer.advantages`, by the trainer's default, unless an environment said its own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace.dashboard.records import TrajectoryRecord
from headrace.data.errors import HeadraceError
from headrace.data.guidance import SCORED_GROUP, Guidance, guidance_of
from headrace.data.packing import attach_metadata
from headrace.data.step import REWARD_INFO
from headrace.data.trajectory import Trajectory
from headrace.pool.errors import Gone, NotFound
from headrace.trainer.advantages import AdvantageBatch, Floats, compared, group_advantages

Read = Callable[[str, str], Trajectory]
Key = TypeVar("Key")
Kept = TypeVar("Kept")

#: How a group's rewards become advantages: the trainer's default.
ADVANTAGE = "grpo"
FROM_GROUP = "computed here from the group's rewards, as GRPO does: (reward - mean) / spread"
FROM_STEPS = "computed here from the rewards of the group's steps, as GRPO does"
FROM_ENVIRONMENT = "sent by the environment, token by token"
SET_TO_ZERO = "0 for the whole sequence: the environment said so"
NO_REWARD, NOTHING_TO_COMPARE = "it has no reward yet", "no other trajectory of its group has a reward"

#: Parts of a reward that are shown, and characters of a part's name.
MAX_PARTS, MAX_NAME = 16, 80
#: Trajectories that are read at a time for what they earned, and of how many it is remembered.
MAX_READ, MAX_KEPT = 256, 20_000
#: Groups of which the steps' rewards are remembered, and trajectories of a group that are compared.
MAX_GROUPS, MAX_COMPARED = 256, 64


def reward_parts(trajectory: Trajectory) -> dict[str, float]:
    """What a trajectory's reward is made of, by name: the numbers that were given beside its steps' rewards, summed
    over the steps. Empty where none were."""
    found: dict[str, float] = {}
    for _, record in sorted(trajectory.tree.records.items()):
        if record.head.reward is None:
            continue
        info = record.head.unpack_extra().metadata.get(REWARD_INFO)
        for name, value in info.items() if isinstance(info, Mapping) else ():
            if type(value) in (int, float) and math.isfinite(value):
                key = str(name)[:MAX_NAME]
                if key in found or len(found) < MAX_PARTS:
                    found[key] = found.get(key, 0.0) + value
    return found


def advantages_of(rewards: Sequence[float | None]) -> list[float | None]:
    """An advantage for each trajectory of a group; None for one without a reward, and where it is the only one."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2:
        return [None] * len(rewards)
    found = iter(group_advantages([known], ADVANTAGE)[0].tolist())
    return [None if reward is None else next(found) for reward in rewards]


class EarnedReader:
    """What trajectories and groups earned, read from the pool by `read` (channel and uid) and then remembered."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parts: OrderedDict[tuple[str, str, float], dict[str, float]] = OrderedDict()
        self._groups: OrderedDict[tuple[Any, ...], dict[str, Floats]] = OrderedDict()

    def parts(self, records: Sequence[TrajectoryRecord], most: int) -> list[dict[str, float]]:
        """The parts of each one's reward. Empty where it has none, where it can no longer be read, where the pool does
        not answer, and where more than `most` would have to be read for it now."""
        found = []
        for record in records:
            key = (record.channel, record.uid, record.reward or 0.0)
            if record.reward is not None and key not in self._parts and most > 0:
                most -= 1
                try:
                    trajectory = self._trajectory(record)
                    _keep(self._parts, key, {} if trajectory is None else reward_parts(trajectory), MAX_KEPT)
                except HeadraceError:
                    most = 0  # the others would wait in vain as well
            found.append(self._parts.get(key, {}) if record.reward is not None else {})
        return found

    def step_rewards(self, group: Sequence[TrajectoryRecord]) -> dict[str, Floats]:
        """What each step of a group's trajectories earned, by their uids; those without a reward are left out. Of one
        that can no longer be read, all of it is the last step's."""
        rewarded = [record for record in group[:MAX_COMPARED] if record.reward is not None]
        key = tuple((record.channel, record.uid, record.reward, record.steps) for record in rewarded)
        if key not in self._groups:
            _keep(self._groups, key, {record.uid: self._steps(record) for record in rewarded}, MAX_GROUPS)
        return self._groups[key]

    def _steps(self, record: TrajectoryRecord) -> Floats:
        trajectory = self._trajectory(record)
        if trajectory is not None:
            return _step_rewards(trajectory)
        found = np.zeros(max(1, record.steps))
        found[-1] = record.reward or 0.0
        return found

    def _trajectory(self, record: TrajectoryRecord) -> Trajectory | None:
        try:
            return self._read(record.channel, record.uid)
        except (Gone, NotFound):
            return None


def _step_rewards(trajectory: Trajectory) -> Floats:
    return np.array([one.head.reward or 0.0 for _, one in sorted(trajectory.tree.records.items())])


def _keep(into: OrderedDict[Key, Kept], key: Key, value: Kept, most: int) -> None:
    into[key] = value
    if len(into) > most:
        into.popitem(last=False)


def token_advantages(
    trajectory: Trajectory, step_index: int, group: Mapping[str, Floats]
) -> tuple[list[float] | None, str]:
    """The advantages of a step's sampled tokens, and where they are from; None with the reason where there are none.
    `group` has what each step earned, for each trajectory of its group that has a reward."""
    records = trajectory.tree.records
    record = records[step_index]
    said: Guidance | None = None
    if any(one.head.extra and SCORED_GROUP in one.head.unpack_extra().metadata for one in records.values()):
        last = records[first_leaf(trajectory, step_index)]
        said = guidance_of(attach_metadata(last.head.unpack_extra().metadata, trajectory.blobs), last.end)
    count = record.head.n_response
    if said is not None and said.misfit:
        return None, f"what the environment says of its tokens does not fit: {said.misfit}"
    if said is not None and said.zero_advantage:
        return [0.0] * count, SET_TO_ZERO
    if said is not None and said.advantages is not None:
        own = said.advantages[record.end - count : record.end]
        return [float(value) for value in own], FROM_ENVIRONMENT
    if trajectory.reward is None:
        return None, NO_REWARD
    group = {**group, trajectory.uid: _step_rewards(trajectory)}  # as it is now, which may be later
    if len(group) < 2:
        return None, NOTHING_TO_COMPARE
    rewards = [np.array([steps.sum() for steps in group.values()])]
    found = compared(AdvantageBatch(rewards, [list(group.values())]), ADVANTAGE)[0]
    own_place = list(group).index(trajectory.uid)
    if isinstance(found, np.ndarray):
        return [float(found[own_place])] * count, FROM_GROUP
    return [float(found[own_place][sorted(records).index(step_index)])] * count, FROM_STEPS


def first_leaf(trajectory: Trajectory, step_index: int) -> int:
    """The last step of the first branch that holds a step: the one in which it is trained on."""
    children: dict[int, list[int]] = {}
    for index, parent in trajectory.parents.items():
        children.setdefault(parent, []).append(index)
    leaves, waiting = [], [step_index]
    while waiting:
        index = waiting.pop()
        following = children.get(index, [])
        waiting += following
        if not following:
            leaves.append(index)
    return min(leaves)
