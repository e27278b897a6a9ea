"""From a batch of groups to what is learned from: sequences with advantages, and a count of what was left out.

Nothing is left out in silence: every trajectory of a batch is either among the sequences or in `Left`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.data.sequence import Sequence
from headrace.data.trajectory import Group, Trajectory
from headrace.trainer.advantages import of_groups
from headrace.trainer.config import AlgorithmConfig


@dataclass
class Left:
    """What a batch brought and was not learned from: groups, trajectories, sequences, answers."""

    zero_variance: int = 0
    unrewarded: int = 0
    untrainable: int = 0
    long: int = 0
    media: int = 0
    truncated: int = 0


@dataclass
class Examples:
    sequences: list[Sequence]
    #: One a trajectory, of all that were rewarded, those of left-out groups too.
    rewards: list[float]
    groups: int
    left: Left = field(default_factory=Left)

    @property
    def targets(self) -> int:
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)


def examples_of(
    groups: Iterable[Group],
    config: AlgorithmConfig,
    max_length: int | None = None,
    scores: Mapping[str, float] | None = None,
) -> Examples:
    """The sequences of a batch, each token with its advantage (with a critic they come later: see `Learner`).

    `scores` are rewards, by their uid, of trajectories that brought none.
    """
    scores = scores or {}
    found = Examples([], [], 0)
    left = found.left
    rewarded: list[tuple[list[Trajectory], list[float]]] = []
    for group in groups:
        found.groups += 1
        every = [(member, scores.get(member.uid, member.reward)) for member in group.trajectories]
        known = [(member, reward) for member, reward in every if reward is not None]
        left.unrewarded += len(every) - len(known)
        if known:
            rewarded.append(([member for member, _ in known], [float(reward) for _, reward in known]))
    found.rewards = [reward for _, rewards in rewarded for reward in rewards]
    critic = config.advantage == "gae"
    rewards = [rewards for _, rewards in rewarded]
    advantages = [np.zeros(len(group)) for group in rewards] if critic else of_groups(rewards, config.advantage)
    for (members, earned), group_advantages in zip(rewarded, advantages, strict=True):
        if not critic and config.skip_zero_variance and not group_advantages.any():
            left.zero_variance += 1
            continue
        for trajectory, reward, advantage in zip(members, earned, group_advantages, strict=True):
            kept = list(_sequences(trajectory, reward, float(advantage), config, max_length, left))
            left.untrainable += not kept
            found.sequences += kept
    return found


def _sequences(
    trajectory: Trajectory,
    reward: float,
    advantage: float,
    config: AlgorithmConfig,
    max_length: int | None,
    left: Left,
) -> Iterable[Sequence]:
    for sequence in trajectory.sequences():
        if sequence.multi_modal_data is not None:
            left.media += 1  # its tokens mean nothing without its images, which models here do not read
            continue
        if max_length is not None and len(sequence) > max_length:
            left.long += 1
            continue
        mask = sequence.loss_mask.copy()
        mask[:1] = False  # nothing comes before it, so nothing predicts it
        if config.mask_truncated:
            for span in sequence.spans:
                if span.trained and span.finish_reason == "length":
                    mask[span.start : span.end] = False
                    left.truncated += 1
        if mask.any():
            advantages = np.where(mask, np.float32(advantage), np.float32(0))
            yield replace(sequence, loss_mask=mask, advantages=advantages, reward=reward)


def rewards_at(sequence: Sequence) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Where in a sequence its trajectory's reward comes: each step's own at its last token, and what other branches
    earned at the sequence's last target, so that the whole is the trajectory's reward."""
    found = np.zeros(len(sequence))
    for span in sequence.spans:
        if span.reward is not None and span.end > span.start:
            found[span.end - 1] += span.reward
    targets = np.flatnonzero(sequence.loss_mask)
    if not len(targets):
        return found
    # A reward that fell on a token that is no target belongs to the target before it.
    for at in np.flatnonzero(found * ~sequence.loss_mask):
        before = targets[targets <= at]
        reward, found[at] = found[at], 0.0
        found[before[-1] if len(before) else targets[0]] += reward
    found[targets[-1]] += (sequence.reward or 0.0) - found.sum()
    return found
