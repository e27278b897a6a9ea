"""What a journal tells of everything that it holds: which calls became which steps, which batch took them, how each
batch ended, and what was dropped, when and why.

`JournalHistory` is pure: a journal's commits come in by `take`, in order. Of what a snapshot stands for, only that is
known which the snapshot has: steps that were there, leases that were out, what became of trajectories that are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.dashboard.history_records import (
    GroupKey,
    SeenBatch,
    SeenEvent,
    SeenGroup,
    SeenStep,
    SeenTrajectory,
    TrajectoryKey,
)
from headrace.data.block import Block, StepHead
from headrace.data.frame import Frame
from headrace.pool import facts as f
from headrace.pool.errors import JournalError
from headrace.pool.journal.records import decode_commit
from headrace.pool.journal.scan import scan
from headrace.pool.readonly import LIVE_READINGS, check_journal


class JournalHistory:
    """Everything that a journal tells; see the module. Not to be used by two threads at once."""

    def __init__(self) -> None:
        self.trajectories: dict[TrajectoryKey, SeenTrajectory] = {}
        self.groups: dict[GroupKey, SeenGroup] = {}
        self.batches: list[SeenBatch] = []
        self.calls: dict[str, tuple[TrajectoryKey, int]] = {}
        self.late_rewards = 0
        self._open_groups: dict[TrajectoryKey, int] = {}
        self._leases: dict[TrajectoryKey, SeenBatch] = {}
        self._needs: dict[str, int] = {}

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, facts: Sequence[f.Fact], block: Block | None) -> None:
        """A commit's facts, with the steps that they are about."""
        for fact in facts:
            handle = _HANDLERS.get(type(fact))
            if handle is not None:
                handle(self, fact, block)

    def of_prompt(self, prompt: str) -> Iterator[SeenGroup]:
        """The groups of a prompt, in every channel; a prompt may have had several."""
        return (group for group in self.groups.values() if group.prompt == prompt)

    def of_trajectory(self, uid: str) -> Iterator[SeenTrajectory]:
        """The trajectories of that name, one a channel at most."""
        return (one for (_, name), one in self.trajectories.items() if name == uid)

    def needed(self, group: SeenGroup) -> int:
        """How many complete trajectories make a group ready."""
        members = [self.trajectories[group.channel, uid] for uid in group.uids]
        return max((one.n_rollouts for one in members if one.n_rollouts), default=self._needs.get(group.channel, 1))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _configured(self, fact: f.Configured | f.Defaulted | f.ChannelImage, block: Block | None) -> None:
        self._needs[fact.channel] = fact.config.n_rollouts
        if isinstance(fact, f.ChannelImage):
            failed = {uid: (reason, at) for uid, _, reason, _, at, _ in fact.failed}
            for uid, reason, prompt, _ in fact.tombstones:
                one = self._trajectory(fact.channel, uid, prompt)
                one.state, one.known_from = reason, "tombstone"
                if uid in failed:
                    one.why, at = failed[uid]
                    one.events.append(SeenEvent(at, f"failed: {one.why}"))

    def _opened(self, fact: f.Opened, block: Block | None) -> None:
        one = self._trajectory(fact.channel, fact.trajectory, fact.prompt)
        one.n_rollouts = fact.n_rollouts or one.n_rollouts
        one.prompt = fact.prompt
        self._join(one, fact.group)
        if not one.events:
            one.events.append(SeenEvent(fact.at, "announced"))

    def _appended(self, fact: f.Appended, block: Block | None) -> None:
        heads = block.heads if block is not None else []
        numbers = fact.groups or (-1,) * len(heads)
        for head, number in zip(heads, numbers, strict=True):
            one = self._trajectory(fact.channel, head.trajectory_uid, head.prompt_uid)
            if one.group < 0 or number >= 0:
                self._join(one, number)
            self._see(one, head, fact.at)

    def _see(self, one: SeenTrajectory, head: StepHead, at: float) -> None:
        peeked = head.peek()
        extra = head.unpack_extra() if b"trainable" in head.extra else None
        step = one.steps[head.step_index] = SeenStep(
            index=head.step_index,
            at=head.created_at or at,
            prompt_tokens=head.keep + head.n_prompt,
            response_tokens=head.n_response,
            version=head.policy_version,
            call=peeked.call_id,
            quarantined=peeked.quarantined,
            trainable=extra is None or extra.trainable,
            reward=head.reward,
        )
        if step.call is not None:
            self.calls[step.call] = ((one.channel, one.uid), step.index)
        if head.is_last:
            one.last = head.step_index

    def _refused(self, fact: f.Refused, block: Block | None) -> None:
        one = self._trajectory(fact.channel, fact.trajectory, fact.prompt)
        if not one.steps and one.state == "queued":
            one.state = fact.reason
        one.events.append(SeenEvent(fact.at, f"{fact.steps} steps came too late and were refused ({fact.reason})"))

    def _amended(self, fact: f.Amended, block: Block | None) -> None:
        one = self.trajectories.get((fact.channel, fact.trajectory))
        step = one.steps.get(fact.index) if one is not None else None
        if one is None or step is None:
            return
        if fact.reward is not None:
            step.reward = fact.reward
            one.events.append(SeenEvent(fact.at, f"step {fact.index} got the reward {fact.reward:g}"))
        if fact.is_last:
            one.last = fact.index
            one.events.append(SeenEvent(fact.at, f"ended at step {fact.index}"))
        if fact.extra is not None and fact.reward is None:
            extra = StepHead("", "", 0, 0, False, extra=fact.extra).unpack_extra()
            if extra.trainable != step.trainable:
                words = "may be trained on" if extra.trainable else "may not be trained on"
                one.events.append(SeenEvent(fact.at, f"step {fact.index} was curated: it {words}"))
            step.trainable = extra.trainable

    def _scored(self, fact: f.Scored, block: Block | None) -> None:
        one = self.trajectories.get((fact.channel, fact.trajectory))
        if one is None:
            return
        for index, reward, _ in fact.rewards:
            if index in one.steps:
                one.steps[index].reward = reward
        words = ", ".join(f"step {index} {reward:g}" for index, reward, _ in fact.rewards)
        one.events.append(SeenEvent(fact.at, f"got rewards: {words}"))

    def _completed(self, fact: f.Completed, block: Block | None) -> None:
        one = self.trajectories.get((fact.channel, fact.trajectory))
        if one is not None:
            one.last = fact.last
            one.events.append(SeenEvent(fact.at, f"completed with {fact.last + 1} steps"))

    def _late_reward(self, fact: f.LateReward, block: Block | None) -> None:
        self.late_rewards += 1
        one = self.trajectories.get((fact.channel, fact.trajectory))
        if one is not None:
            one.events.append(SeenEvent(fact.at, f"the reward {fact.reward:g} came too late and changed nothing"))

    # -- batches -------------------------------------------------------------------------------------------------------

    def _handed_out(self, fact: f.HandedOut, block: Block | None) -> None:
        batch = self._batch(fact)
        batch.groups, batch.replayed = fact.groups, fact.replayed
        for uid in fact.surplus:
            self._drop(
                fact.channel, uid, "surplus", fact.at, "left out: its group had more trajectories than asked for"
            )
        for one in self._members(fact.channel, fact.groups):
            one.state = batch.state
            one.events.append(SeenEvent(fact.at, f"handed out in batch {batch.number}{_lease(batch)}", batch.number))
        for one in self._members(fact.channel, fact.replayed):
            one.events.append(
                SeenEvent(fact.at, f"handed out again, for replay, in batch {batch.number}", batch.number)
            )
        for number in (*fact.groups, *fact.replayed):
            group = self.groups.get((fact.channel, number))
            if group is not None:
                batch.again += bool(group.batches)
                group.batches = (*group.batches, batch.number)

    def _steps_handed_out(self, fact: f.StepsHandedOut, block: Block | None) -> None:
        batch = self._batch(fact)
        batch.steps = fact.steps
        for one, step in self._single(batch):
            batch.again += bool(step.batches)
            step.batches, step.state = (*step.batches, batch.number), batch.state
            one.events.append(
                SeenEvent(fact.at, f"step {step.index} handed out in batch {batch.number}{_lease(batch)}", batch.number)
            )
            self._settle_steps(one)

    def _acked(self, fact: f.Acked, block: Block | None) -> None:
        self._end(fact, "acked", "consumed", "the trainer acknowledged batch {}: consumed")

    def _returned(self, fact: f.Returned, block: Block | None) -> None:
        how = "its lease ran out" if fact.reason == "expired" else "the trainer gave it back"
        self._end(fact, fact.reason, "queued", f"came back from batch {{}}: {how}")

    def _end(self, fact: f.Acked | f.Returned, ended: str, state: str, words: str) -> None:
        batch = self._leases.pop((fact.channel, fact.lease), None)
        if batch is None:
            return
        batch.state, batch.ended_at = ended, fact.at
        event = SeenEvent(fact.at, words.format(batch.number), batch.number)
        for one in self._members(fact.channel, batch.groups):
            if one.state == "leased":
                one.state = state
                one.events.append(event)
        for one, step in self._single(batch):
            step.state = state
            one.events.append(event)
            self._settle_steps(one)

    def _extended(self, fact: f.Extended, block: Block | None) -> None:
        batch = self._leases.get((fact.channel, fact.lease))
        if batch is not None:
            batch.deadline = fact.deadline

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _dropped(self, fact: f.Dropped, block: Block | None) -> None:
        for one in list(self._members(fact.channel, fact.groups)):
            self._drop(fact.channel, one.uid, fact.reason, fact.at, f"dropped with its group: {fact.reason}")

    def _trimmed(self, fact: f.Trimmed, block: Block | None) -> None:
        for one in list(self._members(fact.channel, fact.groups)):
            if one.complete:
                one.events.append(SeenEvent(fact.at, "its group timed out and is served without those not complete"))
            else:
                self._drop(fact.channel, one.uid, "timeout", fact.at, "dropped: not complete when its group timed out")

    def _failed(self, fact: f.Failed, block: Block | None) -> None:
        one = self.trajectories.get((fact.channel, fact.trajectory))
        if one is not None:
            one.why = fact.reason
            what = "quarantined" if fact.quarantine else "dropped"
            self._drop(fact.channel, one.uid, "failed", fact.at, f"failed, and its steps were {what}: {fact.reason}")

    def _forgotten(self, fact: f.Forgotten, block: Block | None) -> None:
        one = self.trajectories.get((fact.channel, fact.trajectory))
        if one is not None:
            one.steps.clear()  # what was to be forgotten is not told either
            self._drop(fact.channel, one.uid, "forgotten", fact.at, "removed on request")

    def _drop(self, channel: str, uid: str, state: str, at: float, words: str) -> None:
        one = self.trajectories.get((channel, uid))
        if one is None:
            return
        one.state = state
        one.events.append(SeenEvent(at, words))
        group = self.groups.get((channel, one.group))
        if group is not None and state in ("surplus", "failed", "timeout"):
            group.uids.pop(uid, None)  # the others of its group go on without it

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _group_image(self, fact: f.GroupImage, block: Block | None) -> None:
        for image in fact.trajectories:
            one = self._trajectory(fact.channel, image.uid, fact.prompt)
            one.known_from, one.state = "snapshot", "consumed" if fact.consumed else "queued"
            one.last = image.last if image.last >= -1 else None
            one.n_rollouts = image.n_rollouts
            self._join(one, fact.seq)
        for head in block.heads if block is not None else ():
            one = self.trajectories[fact.channel, head.trajectory_uid]
            self._see(one, head, fact.at)
        for image in fact.trajectories:
            one = self.trajectories[fact.channel, image.uid]
            for index in image.consumed:
                if index in one.steps:
                    one.steps[index].state = "consumed"

    def _leases_image(self, fact: f.LeasesImage, block: Block | None) -> None:
        replies = set(fact.replies)
        for at, (lease, deadline, request, groups, steps, replayed) in enumerate(fact.leases):
            if at in replies and not lease:
                continue  # an answer that is remembered, for who asks for it again
            batch = self._new_batch(fact.channel, fact.at, lease, deadline, request)
            batch.groups, batch.replayed, batch.steps = groups, replayed, steps
            for one in self._members(fact.channel, groups):
                if one.state == "queued":
                    one.state = "leased"
                one.events.append(SeenEvent(fact.at, f"was out in batch {batch.number}{_lease(batch)}", batch.number))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _trajectory(self, channel: str, uid: str, prompt: str) -> SeenTrajectory:
        key = (channel, uid)
        if key not in self.trajectories:
            self.trajectories[key] = SeenTrajectory(uid, channel, prompt)
        return self.trajectories[key]

    def _join(self, one: SeenTrajectory, number: int) -> None:
        if number < 0:
            number = self._open_groups.get((one.channel, one.prompt), -1)
        if number < 0 or number == one.group:
            return
        before = self.groups.get((one.channel, one.group))
        if before is not None:
            before.uids.pop(one.uid, None)
        group = self.groups.setdefault((one.channel, number), SeenGroup(one.prompt, one.channel, number))
        group.uids[one.uid] = None
        one.group = number
        self._open_groups[one.channel, one.prompt] = number

    def _members(self, channel: str, numbers: Sequence[int]) -> Iterator[SeenTrajectory]:
        for number in numbers:
            group = self.groups.get((channel, number))
            for uid in list(group.uids) if group is not None else ():
                yield self.trajectories[channel, uid]

    def _single(self, batch: SeenBatch) -> Iterator[tuple[SeenTrajectory, SeenStep]]:
        for uid, index in batch.steps:
            one = self.trajectories.get((batch.channel, uid))
            if one is not None and index in one.steps:
                yield one, one.steps[index]

    def _settle_steps(self, one: SeenTrajectory) -> None:
        """A trajectory whose steps go out one by one is where all of them are."""
        states = {step.state for step in one.steps.values() if step.quarantined is None}
        if len(states) == 1:
            one.state = states.pop()

    def _batch(self, fact: f.HandedOut | f.StepsHandedOut) -> SeenBatch:
        return self._new_batch(fact.channel, fact.at, fact.lease, fact.deadline, fact.request)

    def _new_batch(self, channel: str, at: float, lease: str, deadline: float, request: str) -> SeenBatch:
        batch = SeenBatch(len(self.batches) + 1, channel, at, lease, deadline if lease else None, request)
        if not lease:
            batch.state, batch.ended_at = "consumed", at
        else:
            self._leases[channel, lease] = batch
        self.batches.append(batch)
        return batch


def _lease(batch: SeenBatch) -> str:
    return f" (lease {batch.lease})" if batch.lease else ", consumed on hand-out"


def read_history(folder: Path, rest: Callable[[], None] = lambda: None) -> JournalHistory:
    """The history of a journal's folder, also of one that a process has open, which is read as it was at one moment.
    `rest` is called between commits. Raises `NotFound` where there is no journal, `JournalError` for a damaged one."""
    check_journal(folder)
    for left in reversed(range(LIVE_READINGS)):
        history = JournalHistory()

        def take(found: Frame, into: JournalHistory = history) -> None:
            into.take(*decode_commit(found))
            rest()

        found = scan(folder, take)
        if not found.damage:
            return history
        if not left:
            raise JournalError(f"journal {folder} is damaged in {found.damage[0]}; see `headrace pool verify {folder}`")
    raise AssertionError("a reading ends in the loop")


_HANDLERS: dict[type, Callable[..., None]] = {
    f.Configured: JournalHistory._configured,
    f.Defaulted: JournalHistory._configured,
    f.ChannelImage: JournalHistory._configured,
    f.Opened: JournalHistory._opened,
    f.Appended: JournalHistory._appended,
    f.Refused: JournalHistory._refused,
    f.Amended: JournalHistory._amended,
    f.Scored: JournalHistory._scored,
    f.Completed: JournalHistory._completed,
    f.LateReward: JournalHistory._late_reward,
    f.HandedOut: JournalHistory._handed_out,
    f.StepsHandedOut: JournalHistory._steps_handed_out,
    f.Acked: JournalHistory._acked,
    f.Returned: JournalHistory._returned,
    f.Extended: JournalHistory._extended,
    f.Dropped: JournalHistory._dropped,
    f.Trimmed: JournalHistory._trimmed,
    f.Failed: JournalHistory._failed,
    f.Forgotten: JournalHistory._forgotten,
    f.GroupImage: JournalHistory._group_image,
    f.LeasesImage: JournalHistory._leases_image,
}
