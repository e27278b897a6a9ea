"""What an evaluation came to: each rollout, and the means of all, on their way to a table, a page and a file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.files import write_whole


class EvaluatedRollout(msgspec.Struct, frozen=True):
    """One rollout: the row's number, its reward or why there is none, its last answer, and its number of calls."""

    row: int
    rollout: int
    trajectory_uid: str
    reward: float | None
    failure: str | None = None
    text: str | None = None
    calls: int = 0
    parts: dict[str, Any] = {}
    by: dict[str, str] = {}


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an evaluation came to. `mean` and `pass_at` are over rollouts that have a reward; None where none has.
    `metrics` are those that an environment's own evaluation told."""

    name: str
    step: int
    rows: int
    rollouts: int
    failed: int
    mean: float | None
    pass_at: dict[int, float]
    by: dict[str, dict[str, float]]
    seconds: float
    played: list[EvaluatedRollout] = []
    metrics: dict[str, float] = {}


def summary(
    name: str,
    step: int,
    played: Sequence[EvaluatedRollout],
    *,
    rollouts: int,
    pass_reward: float,
    seconds: float,
) -> EvaluationResult:
    """The means of what was played, with `rollouts` of each row. Pure."""
    scored = [one for one in played if one.reward is not None]
    by: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in scored:
        for column, value in one.by.items():
            by[column][value].append(one.reward or 0.0)
    return EvaluationResult(
        name=name,
        step=step,
        rows=len({one.row for one in played}),
        rollouts=len(played),
        failed=len(played) - len(scored),
        mean=_mean(one.reward or 0.0 for one in scored),
        pass_at=pass_rates(scored, rollouts, pass_reward),
        by={
            name: {value: _mean(found) or 0.0 for value, found in sorted(values.items())} for name, values in by.items()
        },
        seconds=round(seconds, 1),
        played=list(played),
    )


def pass_rates(scored: Sequence[EvaluatedRollout], rollouts: int, pass_reward: float) -> dict[int, float]:
    """The chance that one of k rollouts of a row passes, for k of 1, 2, 4, ... and `rollouts`, without bias: over rows
    with at least k scored rollouts, 1 - C(n - c, k) / C(n, k) for n rollouts of which c passed."""
    rows: dict[int, list[bool]] = defaultdict(list)
    for one in scored:
        rows[one.row].append(one.reward is not None and one.reward >= pass_reward)
    ks = sorted({*(2**power for power in range(rollouts.bit_length()) if 2**power <= rollouts), rollouts})
    found: dict[int, float] = {}
    for k in ks:
        rates = [
            1 - math.comb(len(passed) - sum(passed), k) / math.comb(len(passed), k)
            for passed in rows.values()
            if len(passed) >= k
        ]
        if rates:
            found[k] = sum(rates) / len(rates)
    return found


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def write(result: EvaluationResult, path: Path) -> None:
    """Writes a result, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, orjson.dumps(msgspec.to_builtins(result, str_keys=True), option=orjson.OPT_INDENT_2))


def read_results(folder: Path) -> list[EvaluationResult]:
    """The results in a folder, by their steps."""
    found = [msgspec.json.decode(path.read_bytes(), type=EvaluationResult) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: one.step)
