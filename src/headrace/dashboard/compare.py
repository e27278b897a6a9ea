"""Two runs side by side: their figures, their curves, and what the same prompts earned in both. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.dashboard.branches import branch_messages
from headrace.dashboard.earned import MAX_PARTS, MAX_READ, reward_parts
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.records import TrajectoryQuery, TrajectoryRecord
from headrace.data.trajectory import Trajectory
from headrace.rewards.recorded import SampleReader, last_answer

#: Characters of an answer that are shown.
MAX_ANSWER = 4_000


class RunFigures(msgspec.Struct, frozen=True):
    """One run in numbers; means are over trajectories that have the value. `parts` are the mean reward parts of its
    newest trajectories that have a reward, `parts_of` of them, by name."""

    title: str
    trajectories: int
    prompts: int
    consumed: int
    reward: float | None
    tokens: float | None
    turns: float | None
    parts: dict[str, float] = {}
    parts_of: int = 0


class PromptInRun(msgspec.Struct, frozen=True):
    """What a prompt's trajectories earned in one run; `best` is the one with the highest reward."""

    trajectories: int
    reward: float | None
    best: TrajectoryRecord


class ComparedPrompt(msgspec.Struct, frozen=True):
    """A prompt that both runs have."""

    prompt_uid: str
    here: PromptInRun
    beside: PromptInRun
    gain: float | None


class Comparison(msgspec.Struct, frozen=True):
    """Two runs: `curves` by chart, each with the points of both; prompts of both, those whose reward differs most
    first. `reading`: one of them was not read through yet."""

    here: RunFigures
    beside: RunFigures
    curves: dict[str, dict[str, Any]]
    prompts: list[ComparedPrompt]
    total: int
    reading: bool = False


class Answer(msgspec.Struct, frozen=True):
    """The last answer of a prompt's best trajectory in one run, and what its reward is made of; `why_none` where the
    answer is not told."""

    uid: str
    reward: float | None
    text: str | None
    why_none: str | None = None
    parts: dict[str, float] = {}


class RunSummary(msgspec.Struct, frozen=True):
    """What two runs are compared by: one's figures, and its trajectories by prompt. Its index goes on without it."""

    figures: RunFigures
    by_prompt: dict[str, list[TrajectoryRecord]]


def compare(
    here: RunSummary,
    beside: RunSummary,
    curves: tuple[dict[str, Any], dict[str, Any]],
    offset: int,
    limit: int,
) -> Comparison:
    """Two runs, with the curves of both."""
    own, others = here.by_prompt, beside.by_prompt
    both = [
        ComparedPrompt(prompt, a := _in_run(own[prompt]), b := _in_run(others[prompt]), _gain(a, b))
        for prompt in own
        if prompt in others
    ]
    both.sort(key=lambda one: (one.gain is None, -abs(one.gain or 0.0)))
    return Comparison(here.figures, beside.figures, merged(*curves), both[offset : offset + limit], len(both))


def with_parts(run: RunSummary, parts: Sequence[dict[str, float]]) -> RunSummary:
    """A run with the mean of what some of its rewards are made of; a reward that lacks a part has 0 of it."""
    known = [one for one in parts if one]
    names = dict.fromkeys(name for one in known for name in one)
    means = {name: sum(one.get(name, 0.0) for one in known) / len(known) for name in list(names)[:MAX_PARTS]}
    return replace(run, figures=replace(run.figures, parts=means, parts_of=len(known)))


def newest_rewarded(index: TrajectoryIndex) -> list[TrajectoryRecord]:
    """Of a run's trajectories that have a reward the newest, as far as they are read for their parts."""
    found = index.page(TrajectoryQuery(limit=MAX_READ)).rows
    return [row for row in found if row.reward is not None]


def summary(title: str, index: TrajectoryIndex) -> RunSummary:
    """A run's numbers and trajectories as they are now."""
    by_prompt = index.by_prompt()
    rewards, consumed, _ = index.measured("reward")
    tokens, turns = index.measured("tokens")[0], index.measured("steps")[0]
    known = rewards[rewards == rewards]
    figures = RunFigures(
        title,
        len(index),
        len(by_prompt),
        int(consumed.sum()),
        float(known.mean()) if len(known) else None,
        float(tokens.mean()) if len(tokens) else None,
        float(turns.mean()) if len(turns) else None,
    )
    return RunSummary(figures, by_prompt)


def merged(here: dict[str, Any], beside: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Charts that either run has, by the first of their fields; a run has None at steps of the other's alone."""
    found: dict[str, dict[str, Any]] = {}
    for chart in [*here, *(name for name in beside if name not in here)]:
        sides = [_points(curves.get(chart, {})) for curves in (here, beside)]
        steps = sorted(sides[0].keys() | sides[1].keys())
        found[chart] = {
            "step": steps,
            "this run": [sides[0].get(step) for step in steps],
            "the other": [sides[1].get(step) for step in steps],
        }
    return found


def best_answer(trajectory: Trajectory, reader: SampleReader | None) -> Answer:
    """The last answer of a trajectory."""
    parts = reward_parts(trajectory)
    if reader is None:
        return Answer(trajectory.uid, trajectory.reward, None, "no tokenizer is known here", parts)
    try:
        text = last_answer(branch_messages(trajectory, max(trajectory.tree.records), reader))
    except Exception as error:  # templates and parsers of strangers may raise anything
        return Answer(trajectory.uid, trajectory.reward, None, f"it cannot be read back: {error}"[:300], parts)
    return Answer(trajectory.uid, trajectory.reward, text[:MAX_ANSWER], None, parts)


def _points(curve: dict[str, Any]) -> dict[int, float | None]:
    names = [name for name in curve if name != "step"]
    return dict(zip(curve["step"], curve[names[0]], strict=True)) if names else {}


def _in_run(rows: list[TrajectoryRecord]) -> PromptInRun:
    rewards = [row.reward for row in rows if row.reward is not None]
    best = max(rows, key=lambda row: float("-inf") if row.reward is None else row.reward)
    return PromptInRun(len(rows), sum(rewards) / len(rewards) if rewards else None, best)


def _gain(here: PromptInRun, beside: PromptInRun) -> float | None:
    return None if here.reward is None or beside.reward is None else here.reward - beside.reward
