"""From a batch of groups to what is learned from: sequences with advantages, and a count of what was skipped. Rewards
that trajectories did not bring are asked of the gateway's `/compute_reward` before.

Nothing is skipped in silence: every trajectory of a batch is either among the sequences, in `SkippedCounts` or in
`filtered`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.data.errors import HeadraceError
from headrace.data.sequence import Sequence
from headrace.data.step import FloatArray
from headrace.data.trajectory import Group, Trajectory
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import HttpAnswer, NoAnswer, seconds_of
from headrace.trainer.advantages import AdvantageBatch, Floats
from headrace.trainer.config import AlgorithmConfig
from headrace.trainer.filters import FilterGroup, overlong_penalty, sampled_tokens
from headrace.trainer.own_functions import advantages_of, filters_of
from headrace.trainer.stopping import Outage, StopSignal
from headrace.trainer.sync.http import PASSING, ServerFailed, ask_again

log = logging.getLogger(__name__)

SCORE_PATH = "/compute_reward"
#: How long one reward may take: a judge model answers within it.
SCORE_TIMEOUT_S = 120.0
#: The code with which a gateway says that it has no reward worker.
NO_WORKER_CODE = b"no_reward_worker"
#: The code with which it says that its reward worker failed at one answer.
FAILED_CODE = b"reward_failed"
#: How often an answer is asked about at which the reward worker fails in a way that may pass: its judge took too long,
#: or said nothing that can be read.
FAILED_TRIES = 3
#: Statuses that every trajectory would get: the key or the address is wrong.
DENIED = (401, 403, 404)
#: What is sent to find that out.
_TRIED = {"prompt_ids": [0], "response_ids": [0]}


class NotScored(HeadraceError):
    """A reward that was asked for did not come."""

    code = "not_scored"


class GatewayScorer:
    """Asks a gateway's `/compute_reward` for rewards."""

    def __init__(
        self, gateway: str, key: str | None = None, *, stop: StopSignal | None = None, outage: Outage | None = None
    ) -> None:
        """`stop` ends the wait for a gateway that does not answer; `outage` is told of it, by default it is logged."""
        self._client = BlockingHttpClient(gateway, timeout_s=SCORE_TIMEOUT_S, key=key)
        self._url = self._client.address + SCORE_PATH
        self._stop = stop or StopSignal()
        self._outage = outage or Outage(f"the reward worker {gateway}", log.warning)

    def check(self) -> None:
        """Raises `NotScored` where the gateway says that nobody scores there: a run would wait for rewards in vain."""
        try:
            answer = self._client.request("POST", SCORE_PATH, json=_TRIED)
        except NoAnswer:
            return  # it may come up before there is anything to score
        if answer.status != 200 and NO_WORKER_CODE in answer.body:
            raise NotScored(
                f"score_unrewarded needs a gateway with a reward worker, and {self._url} has none: leave it out, "
                "and set rewards before trajectories are completed"
            )

    def scores(self, trajectories: Iterable[Trajectory]) -> dict[str, float]:
        """By trajectory uid, the rewards of those that have none and have something to score; one that cannot be scored
        is left out, and told of in the log. A gateway that does not answer, or is too busy, is waited for. Raises
        `NotScored` where nobody scores there, and `Stopped` where the run is stopped first."""
        found: dict[str, float] = {}
        failed: dict[str, str] = {}
        for trajectory in trajectories:
            body = _body(trajectory) if trajectory.reward is None else None
            if body is None:
                continue
            given = ask_again(_Question(self._client, self._url, trajectory.uid, body), self._stop, self._outage)
            if isinstance(given, str):
                failed[trajectory.uid] = given
            else:
                found[trajectory.uid] = given
        if failed:
            uid, why = next(iter(failed.items()))
            log.warning("%d trajectories could not be scored and are skipped, %s: %s", len(failed), uid, why)
        return found


class _Question:
    """One trajectory's reward, asked for by a call; it may be called again."""

    def __init__(self, client: BlockingHttpClient, url: str, uid: str, body: dict[str, Any]) -> None:
        self._client, self._url, self._uid, self._body = client, url, uid, body
        self._failures = 0

    def __call__(self) -> float | str:
        """The reward, or why this trajectory has none. Raises `ServerFailed` where asking again may help, and
        `NotScored` where no other trajectory would get one either."""
        try:
            answer = self._client.request("POST", SCORE_PATH, json=self._body)
        except NoAnswer as error:
            raise ServerFailed(str(error), reason=error.reason.lower()) from error
        if answer.status == 200:
            try:
                return float(answer.json()["reward_score"])
            except (ValueError, KeyError, TypeError) as error:
                raise NotScored(f"{self._url} gave no reward for trajectory {self._uid}: {error}") from error
        said = f"{self._url} answered {answer.status} for trajectory {self._uid}: {answer.error_text()}"
        if answer.status in DENIED or NO_WORKER_CODE in answer.body:
            raise NotScored(said)
        if self._may_pass(answer):
            after_s = seconds_of(answer.headers.get("retry-after", ""))
            raise ServerFailed(said, answer.status, reason=answer.error_text(), retry_after_s=after_s)
        if 400 <= answer.status < 500 or FAILED_CODE in answer.body:
            return f"{answer.status}: {answer.error_text()}"
        raise NotScored(said)

    def _may_pass(self, answer: HttpAnswer) -> bool:
        self._failures += FAILED_CODE in answer.body
        return answer.status in PASSING and self._failures < FAILED_TRIES


def _body(trajectory: Trajectory) -> dict[str, Any] | None:
    """The trajectory's last path: what came before the first sampled token, and all after it."""
    sequences = trajectory.sequences()
    if not sequences:
        return None
    last = sequences[-1]
    begin = min(span.start for span in last.spans)
    return {
        "prompt_ids": np.asarray(last.tokens[:begin]).tolist(),
        "response_ids": np.asarray(last.tokens[begin:]).tolist(),
        "dataset_fields": trajectory.metadata,
        "num_turns": len(last.spans),
    }


@dataclass
class SkippedCounts:
    """What a batch brought and was not learned from: groups, trajectories, sequences, answers."""

    zero_variance: int = 0
    unrewarded: int = 0
    untrainable: int = 0
    long: int = 0
    media: int = 0
    misaligned: int = 0
    untaught: int = 0
    truncated: int = 0

    def metrics(self) -> dict[str, int]:
        """The counts by their names in a row of metrics, which are those of `SKIP_REASONS`."""
        counts = {f"skipped_{name}": count for name, count in vars(self).items()}
        counts["masked_truncated"] = counts.pop("skipped_truncated")  # of sequences that are learned from
        return counts


@dataclass
class Examples:
    """What one batch gives to learn from, and counts of what it does not."""

    sequences: list[Sequence]
    #: One for each trajectory that was rewarded, those of skipped groups too; without a penalty for its length.
    rewards: list[float]
    groups: int
    skipped: SkippedCounts = field(default_factory=SkippedCounts)
    #: Trajectories that filters left out, by the filter's name: each is counted by the first that did.
    filtered: dict[str, int] = field(default_factory=dict)
    #: Trajectories that could be learned from, before groups were skipped and filtered.
    trajectories: int = 0
    #: Trajectories whose reward was lowered for their length.
    penalised: int = 0

    @property
    def targets(self) -> int:
        """How many tokens are trained on."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)


@dataclass
class Candidates:
    """The trajectories of one group that may be learned from, their rewards, and what is taken off for their length."""

    members: list[Trajectory]
    rewards: list[float | None]
    penalties: list[float]

    @property
    def earned(self) -> list[float]:
        """What they are compared by."""
        return [(reward or 0.0) - penalty for reward, penalty in zip(self.rewards, self.penalties, strict=True)]


def examples_of(
    groups: Iterable[Group],
    config: AlgorithmConfig,
    max_length: int | None = None,
    scores: Mapping[str, float] | None = None,
) -> Examples:
    """The sequences of a batch, each token with its advantage (with a critic they come later: see `Learner`).

    `scores` are rewards, by their uid, of trajectories that brought none. Raises `InvalidInput` where a function of the
    user's own fails.
    """
    filters = filters_of(config)
    found = Examples([], [], 0, filtered={name: 0 for name, _ in filters})
    skipped = found.skipped
    every = [_candidates(group, config, scores or {}, found) for group in groups]
    every = [group for group in every if group.members]
    for group, group_advantages in zip(every, _advantages(every, config), strict=True):
        equal = config.skips_equal and not any(steps.any() for steps in group_advantages)
        if equal and not any(_teaches(member, config) for member in group.members):
            skipped.zero_variance += 1
            continue
        kept = np.ones(len(group.members), np.bool_)
        if filters:
            view = FilterGroup.of(group.members, group.rewards)
            for name, keeps in filters:
                keep = keeps(view)
                found.filtered[name] += int((kept & ~keep).sum())
                kept &= keep
        for at in np.flatnonzero(kept):
            reward = None if group.rewards[at] is None else group.earned[at]
            made = list(_sequences(group.members[at], reward, group_advantages[at], config, max_length, skipped))
            skipped.untrainable += not made
            found.sequences += made
    return found


def _candidates(group: Group, config: AlgorithmConfig, scores: Mapping[str, float], found: Examples) -> Candidates:
    """The group's trajectories that are rewarded, or all where no reward is needed; counted in `found`."""
    found.groups += 1
    made = Candidates([], [], [])
    for member in group.trajectories:
        reward = scores.get(member.uid, member.reward)
        if reward is not None:
            found.rewards.append(float(reward))
        elif config.needs_rewards:
            found.skipped.unrewarded += 1
            continue
        penalty = 0.0 if config.overlong is None else overlong_penalty(sampled_tokens(member), config.overlong)
        found.penalised += penalty > 0
        made.members.append(member)
        made.rewards.append(None if reward is None else float(reward))
        made.penalties.append(penalty)
    found.trajectories += len(made.members)
    return made


def _advantages(groups: list[Candidates], config: AlgorithmConfig) -> list[list[Floats]]:
    """An advantage for each step of each trajectory, in their order."""
    steps = [
        [_step_rewards(*each, config) for each in zip(one.members, one.rewards, one.penalties, strict=True)]
        for one in groups
    ]
    if config.advantage == "gae" or not config.needs_rewards:
        return [[np.zeros(len(one)) for one in group] for group in steps]
    return advantages_of(AdvantageBatch([np.array(one.earned, np.float64) for one in groups], steps), config)


def _step_rewards(trajectory: Trajectory, reward: float | None, penalty: float, config: AlgorithmConfig) -> Floats:
    """What each step earned. The penalty is the last one's, as is the whole reward where no step was rewarded by itself
    or with `process_rewards: false`."""
    own = [record.head.reward for _, record in sorted(trajectory.tree.records.items())]
    if not config.process_rewards or all(one is None for one in own):
        own = [*(None for _ in own[:-1]), *(reward for _ in own[-1:])]
    found = np.array([one or 0.0 for one in own])
    found[-1:] -= penalty
    return found


def _teaches(trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Whether an environment's own words make it worth learning from, where its reward does not."""
    said = [one.guidance for one in trajectory.sequences() if one.guidance is not None]
    return any(
        one.advantages is not None or one.misfit or (config.distill and one.teacher_ids is not None) for one in said
    )


def _sequences(
    trajectory: Trajectory,
    reward: float | None,
    step_advantages: Floats,
    config: AlgorithmConfig,
    max_length: int | None,
    skipped: SkippedCounts,
) -> Iterable[Sequence]:
    by_step = dict(zip(sorted(trajectory.tree.records), step_advantages.tolist(), strict=True))
    for sequence in trajectory.sequences():
        if sequence.guidance is not None and sequence.guidance.misfit:
            skipped.misaligned += 1  # what was said about its tokens cannot be meant for them
            continue
        if config.teacher is not None and config.teacher.address is None and not _has_reference(sequence):
            skipped.untaught += 1  # nobody can be asked what it thinks of its tokens
            continue
        if sequence.multi_modal_data is not None:
            skipped.media += 1  # its tokens mean nothing without its images, which models here do not read
            continue
        if max_length is not None and len(sequence) > max_length:
            skipped.long += 1
            continue
        mask = sequence.loss_mask.copy()
        mask[:1] = False  # nothing comes before it, so nothing predicts it
        if config.mask_truncated:
            for span in sequence.spans:
                if span.trained and span.finish_reason == "length":
                    mask[span.start : span.end] = False
                    skipped.truncated += 1
        if mask.any():
            advantages = np.zeros(len(sequence), np.float32)
            for span in sequence.spans:
                advantages[span.start : span.end] = by_step[span.step_index]
            # Imitation is of the model itself, whatever temperature another sampled at.
            spans = tuple(replace(one, temperature=1.0) for one in sequence.spans) if config.loss == "sft" else None
            kept = replace(sequence, loss_mask=mask, reward=reward, spans=spans or sequence.spans)
            yield replace(kept, advantages=guided(kept, advantages))


def _has_reference(sequence: Sequence) -> bool:
    return sequence.guidance is not None and sequence.guidance.ref_log_probs is not None


def guided(sequence: Sequence, advantages: FloatArray) -> FloatArray:
    """The advantages of a sequence's tokens: those that came with it, else these; 0 where it is no target, and
    everywhere where its environment said so."""
    said = sequence.guidance
    if said is not None and said.zero_advantage:
        return np.zeros(len(sequence), np.float32)
    given = said.advantages if said is not None and said.advantages is not None else advantages
    return np.where(sequence.loss_mask, given, np.float32(0))


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
