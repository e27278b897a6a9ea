"""`Trajectory` and `Group`: what is read out of a pool. Both are snapshots; nothing in them changes.

Steps are kept packed and unpacked when asked for, so a trajectory of 50 turns costs its length, not 50 prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.frame import Buffer
from headrace.data.packing import inherit_metadata, unpack
from headrace.data.sequence import Sequence, parents_of, sequences_of
from headrace.data.step import Step
from headrace.data.tree import TokenTree


class Trajectory(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The steps of one `trajectory_uid`: a tree, most often of one branch."""

    uid: str
    prompt_uid: str
    channel: str
    complete: bool
    metadata: dict[str, Any]
    tree: TokenTree
    blobs: dict[bytes, Buffer] = {}
    n_rollouts: int | None = None
    state: str = "queued"

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def steps(self) -> list[Step]:
        """Every step, quarantined ones too, by index, each with its full prompt and with the trajectory's metadata
        beside its own, which goes before."""
        steps = self.own_steps
        inherit_metadata(steps, self.metadata)
        return steps

    @property
    def own_steps(self) -> list[Step]:
        """The same steps with nothing but their own metadata, as they were submitted."""
        tree = self.tree
        return [
            unpack(record, tree.prompt(index) if record.head.base >= 0 else None, self.blobs)
            for index, record in sorted(tree.records.items())
        ]

    @property
    def parents(self) -> dict[int, int]:
        """The tree: for each step index the one it continues, -1 for a root."""
        return parents_of(self.tree)

    @property
    def reward(self) -> float | None:
        """The sum of its steps' rewards, None where none was given."""
        rewards = [r.head.reward for _, r in sorted(self.tree.records.items()) if r.head.reward is not None]
        return float(sum(rewards)) if rewards else None

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for JSON and for people; each step with its whole prompt."""
        return {
            "trajectory_uid": self.uid,
            "prompt_uid": self.prompt_uid,
            "channel": self.channel,
            "complete": self.complete,
            "metadata": self.metadata,
            "steps": [step.to_dict() for step in self.steps],
        }

    def sequences(self) -> list[Sequence]:
        """Its root-to-leaf paths, as a trainer learns from them."""
        return sequences_of(self.tree, self.uid, self.prompt_uid, self.metadata, self.blobs)


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The trajectories of one `prompt_uid`, as handed to a consumer.

    `deliveries` counts hand-outs, this one included; `replayed` marks a group that was consumed before and comes from
    the channel's history; `partial` one that timed out with fewer trajectories than it wanted.
    """

    prompt_uid: str
    trajectories: tuple[Trajectory, ...]
    deliveries: int = 1
    replayed: bool = False
    partial: bool = False
    oldest_version: int = 0

    @property
    def steps(self) -> list[Step]:
        """Every step but quarantined ones, trajectory by trajectory, each with its full prompt."""
        return [step for trajectory in self.trajectories for step in trajectory.steps if step.quarantined is None]

    @property
    def rewards(self) -> list[float | None]:
        """One for each trajectory, however many branches it has."""
        return [trajectory.reward for trajectory in self.trajectories]

    def sequences(self) -> list[Sequence]:
        """What to train on: its trajectories' root-to-leaf paths."""
        return [sequence for trajectory in self.trajectories for sequence in trajectory.sequences()]
