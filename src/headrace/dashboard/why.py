"""Why something was, or was not, trained on: from a call, a trajectory, a group or a batch to what became of it, and
from a batch back to the calls that it was made of. Pure: out of a journal's history."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.dashboard.history import JournalHistory
from headrace.dashboard.history_records import SeenBatch, SeenEvent, SeenGroup, SeenStep, SeenTrajectory
from headrace.pool.errors import NotFound

#: Lines of one answer at most; a trajectory of 10,000 steps has more.
MAX_LINES = 2_000

#: What the reasons of a drop mean.
DROP_REASONS = {
    "capacity": "the channel was full (`max_queue_size`), and its group was the oldest",
    "timeout": "its group was not complete in time (`group_timeout_s`)",
    "stale": "its oldest step was more versions behind than `max_staleness` allows",
    "surplus": "its group had more trajectories than the batch asked for",
    "late": "its group had left the pool when its steps came",
    "forgotten": "it was removed on request",
    "damaged": "the journal was damaged, and it could not be brought back",
}


class WhyLine(msgspec.Struct, frozen=True):
    """One thing that happened; where it is about a step, with its call, and where about a batch, with its number."""

    at: float | None
    words: str
    trajectory: str | None = None
    step: int | None = None
    call: str | None = None
    batch: int | None = None


class Why(msgspec.Struct, frozen=True):
    """The answer about one thing. `kind` is `trajectory`, `call`, `group` or `batch`; `left_out` counts lines past
    `MAX_LINES`."""

    kind: str
    name: str
    channel: str
    verdict: str
    lines: list[WhyLine]
    left_out: int = 0


def why(history: JournalHistory, name: str, channel: str | None = None) -> list[Why]:
    """What became of everything of that name: a trajectory's uid, a call's id, a prompt's uid, a lease's id or a
    batch's number (`batch 3`). Raises `NotFound` where the journal tells of none."""
    found = list(_answers(history, name))
    if channel is not None:
        found = [one for one in found if one.channel == channel]
    if not found:
        raise NotFound(
            f"the journal tells of no trajectory, call, prompt, lease or batch {name!r}"
            f"{'' if channel is None else f' in channel {channel!r}'}; of what was compacted it keeps the last names"
        )
    return found


def _answers(history: JournalHistory, name: str) -> Iterator[Why]:
    for one in history.of_trajectory(name):
        yield _of_trajectory(history, one)
    calls = [name] if name in history.calls else []
    calls += [call for call in history.calls if call.startswith(f"{name}-")] if not calls else []  # a call's choices
    for call in calls:
        key, index = history.calls[call]
        yield _of_call(history, call, history.trajectories[key], index)
    for group in history.of_prompt(name):
        yield _of_group(history, group)
    number = name.removeprefix("batch ")
    for batch in history.batches:
        if name in (batch.lease, batch.request) or (number != name and number == str(batch.number)):
            yield _of_batch(history, batch)


def verdict(history: JournalHistory, one: SeenTrajectory) -> str:
    """One sentence on what became of a trajectory."""
    if one.state == "consumed":
        batch = next((event.batch for event in reversed(one.events) if event.batch), 0)
        if not batch:
            return "It was handed to a trainer for good; the journal has been compacted since, and keeps no more of it."
        masked = [step.index for step in one.steps.values() if step.quarantined is not None or not step.trainable]
        but = f" But for {_steps(masked)}: quarantined or curated, so context only." if masked else ""
        how = "acknowledged" if history.batches[batch - 1].state == "acked" else "handed out for good"
        return f"It was trained on: batch {batch} was {how}.{but}"
    if one.state == "leased":
        batch = next((event.batch for event in reversed(one.events) if event.batch), 0)
        return f"It is with a trainer, in batch {batch}, which has not been acknowledged yet."
    if one.state == "queued":
        return _waiting(history, one)
    if one.state == "failed":
        return f"It was not trained on: it failed ({one.why or 'no reason was given'})."
    return f"It was not trained on: {DROP_REASONS.get(one.state, one.state)}."


def _waiting(history: JournalHistory, one: SeenTrajectory) -> str:
    if not one.complete:
        return "It waits: it has not ended, or not all of its steps are there."
    group = history.groups.get((one.channel, one.group))
    if group is None:
        return "It waits in its group."
    needed, complete = history.needed(group), sum(history.trajectories[one.channel, uid].complete for uid in group.uids)
    if complete < needed:
        return f"It waits: {complete} of the {needed} trajectories of its group are complete."
    if group.batches:
        return f"It waits for a trainer to take it again: it came back from batch {group.batches[-1]}."
    return "It waits for a trainer: its group has as many complete trajectories as it needs."


def _of_trajectory(history: JournalHistory, one: SeenTrajectory) -> Why:
    lines = _lines(one)
    return Why("trajectory", one.uid, one.channel, verdict(history, one), lines[:MAX_LINES], _left_out(lines))


def _of_call(history: JournalHistory, call: str, one: SeenTrajectory, index: int) -> Why:
    step = one.steps.get(index)
    said = verdict(history, one)
    if step is not None and step.quarantined is not None:
        said = f"It was not trained on: its step is quarantined ({step.quarantined})."
    elif step is not None and not step.trainable:
        said = f"Its step may not be trained on; the trajectory's others may. {said}"
    lines = [line for line in _lines(one) if line.step in (None, index)]
    begins = WhyLine(None, f"it is step {index} of trajectory {one.uid} (prompt {one.prompt})", one.uid, index, call)
    return Why("call", call, one.channel, said, [begins, *lines][:MAX_LINES], _left_out(lines))


def _of_group(history: JournalHistory, group: SeenGroup) -> Why:
    key = (group.channel, group.number)
    members = [one for one in history.trajectories.values() if (one.channel, one.group) == key]
    lines = [WhyLine(_first(one), f"{one.uid}: {verdict(history, one)}", one.uid) for one in members]
    complete, needed = sum(one.complete for one in members), history.needed(group)
    out = f"; it went out in {_numbers(group.batches)}" if group.batches else "; it was in no batch"
    said = f"{len(members)} trajectories, {complete} complete of the {needed} that it needs{out}."
    return Why("group", group.prompt, group.channel, said, lines[:MAX_LINES], _left_out(lines))


def _of_batch(history: JournalHistory, batch: SeenBatch) -> Why:
    lines: list[WhyLine] = []
    for number in (*batch.groups, *batch.replayed):
        group = history.groups.get((batch.channel, number))
        for uid in group.uids if group is not None else ():
            one = history.trajectories[batch.channel, uid]
            lines += [_step_line(one, step) for step in one.steps.values()]
    for uid, index in batch.steps:
        trajectory = history.trajectories.get((batch.channel, uid))
        if trajectory is not None and index in trajectory.steps:
            lines.append(_step_line(trajectory, trajectory.steps[index]))
    ends = {
        "leased": "is with a trainer",
        "acked": "was acknowledged: it was trained on",
        "consumed": "was consumed on hand-out",
        "nack": "was given back",
        "expired": "came back: its lease ran out",
    }
    what = f"{len(batch.groups) + len(batch.replayed)} groups" if not batch.steps else f"{len(batch.steps)} steps"
    again = f", {batch.again} of them not for the first time" if batch.again else ""
    said = f"Batch {batch.number} of {what}{again} {ends.get(batch.state, batch.state)}."
    return Why("batch", batch.lease or str(batch.number), batch.channel, said, lines[:MAX_LINES], _left_out(lines))


def _lines(one: SeenTrajectory) -> list[WhyLine]:
    if one.known_from == "tombstone":
        return [WhyLine(event.at, event.words, one.uid) for event in one.events]
    lines = [_step_line(one, step) for step in one.steps.values()]
    lines += [_event_line(one, event) for event in one.events]
    lines.sort(key=lambda line: line.at or 0.0)
    if one.known_from == "snapshot":
        lines.insert(0, WhyLine(None, "the journal was compacted: what happened before that is not told", one.uid))
    return lines


def _event_line(one: SeenTrajectory, event: SeenEvent) -> WhyLine:
    return WhyLine(event.at, event.words, one.uid, batch=event.batch or None)


def _step_line(one: SeenTrajectory, step: SeenStep) -> WhyLine:
    parts = [
        f"step {step.index} of {one.uid}: {step.prompt_tokens} prompt and {step.response_tokens} response tokens",
        f"version {step.version}",
    ]
    if step.reward is not None:
        parts.append(f"reward {step.reward:g}")
    if step.quarantined is not None:
        parts.append(f"quarantined ({step.quarantined})")
    if not step.trainable:
        parts.append("not trainable")
    return WhyLine(step.at, ", ".join(parts), one.uid, step.index, step.call)


def _first(one: SeenTrajectory) -> float | None:
    return min((step.at for step in one.steps.values()), default=one.events[0].at if one.events else None)


def _left_out(lines: list[WhyLine]) -> int:
    return max(0, len(lines) - MAX_LINES)


def _numbers(batches: tuple[int, ...]) -> str:
    return ("batch " if len(batches) == 1 else "batches ") + ", ".join(map(str, batches))


def _steps(indexes: list[int]) -> str:
    shown = ", ".join(map(str, indexes[:10])) + (", …" if len(indexes) > 10 else "")
    return f"step {shown}" if len(indexes) == 1 else f"steps {shown}"
