"""What a probe found: the lowest and highest reward, and how much of it a policy gets without an answer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Share of the way from floor to ceiling at which a policy without an answer makes the reward hackable.
HACKABLE_SHARE = 0.5
NO_ANSWERS = (
    "nothing found, and little could be: no item carries an answer, so that nothing says what a right one earns. Give "
    "the environment a gold_answer(item), or its items a key such as 'answer'"
)
COLUMNS = ("policy", "mean", "min", "max", "rollouts", "same again", "")


@dataclass
class PolicyScores:
    """What one policy earned. Of `repeated` items, `same` paid the same for the same answer again."""

    policy: str
    knows: bool
    scores: list[float] = field(default_factory=list)
    repeated: int = 0
    same: int = 0
    error: str | None = None

    @property
    def mean(self) -> float:
        """The mean score; raises where there is none."""
        return statistics.fmean(self.scores)

    def as_dict(self) -> dict[str, Any]:
        """The policy's part of the report, as JSON has it."""
        found = {"policy": self.policy, "knows_answer": self.knows, "rollouts": len(self.scores), "error": self.error}
        if self.scores:
            found |= {"mean": self.mean, "min": min(self.scores), "max": max(self.scores)}
        return found | {"repeated": self.repeated, "same": self.same}


@dataclass
class ProbeReport:
    """What a probe found, of the policies with a score or an error; `seconds` are those of a rollout, of each group."""

    environment: str
    items: int
    outcomes: Sequence[PolicyScores]
    seconds: Sequence[float]
    judged: bool

    @property
    def floor(self) -> float:
        """The lowest mean score of a policy."""
        return min(one.mean for one in self._scored())

    @property
    def ceiling(self) -> float:
        """The mean score of the right answer; where no item carries one, the highest mean."""
        return max(one.mean for one in (self._scored(knows=True) or self._scored()))

    @property
    def best_hack(self) -> PolicyScores | None:
        """The policy without an answer that earned most; None where none has a score."""
        return max(self._scored(knows=False), key=lambda one: one.mean, default=None)

    @property
    def hackable(self) -> float | None:
        """How far from floor to ceiling the best policy without an answer gets, 0 to 1; None without a right answer."""
        best = self.best_hack
        if best is None or not self._scored(knows=True) or self.floor == max(best.mean, self.ceiling):
            return None
        if best.mean >= self.ceiling:
            return 1.0
        return (best.mean - self.floor) / (self.ceiling - self.floor)

    @property
    def deterministic(self) -> float | None:
        """The share of repeated answers that earned the same again."""
        repeated = sum(one.repeated for one in self.outcomes)
        return sum(one.same for one in self.outcomes) / repeated if repeated else None

    def findings(self) -> list[str]:
        """What is wrong with the reward, one sentence each; empty where it is fit to be trained on."""
        found = []
        scored, best, hackable = self._scored(), self.best_hack, self.hackable
        if self._scored(knows=True) and len({score for one in scored for score in one.scores}) == 1:
            found.append(f"flat: everything earns {scored[0].scores[0]:g}, the right answer too")
        elif hackable is not None and best is not None and hackable >= HACKABLE_SHARE:
            found.append(
                f"hackable: {best.policy!r} earns {best.mean:.3g} without an answer, where the right one earns "
                f"{self.ceiling:.3g}"
            )
        if self.deterministic is not None and self.deterministic < 1:
            named = ", ".join(repr(one.policy) for one in self.outcomes if one.same < one.repeated)
            found.append(f"not deterministic: the same answer earned something else the second time ({named})")
        for one in self.outcomes:
            if one.error:
                found.append(f"raises: {one.policy!r} ends a rollout with {one.error}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The report, as JSON has it."""
        best = self.best_hack
        return {
            "environment": self.environment,
            "items": self.items,
            "floor": self.floor,
            "ceiling": self.ceiling,
            "ceiling_is_gold": bool(self._scored(knows=True)),
            "hackable": self.hackable,
            "best_hack": best.policy if best else None,
            "deterministic": self.deterministic,
            "judged": self.judged,
            "latency_s": {"median": statistics.median(self.seconds), "max": max(self.seconds)},
            "policies": [one.as_dict() for one in self.outcomes],
            "findings": self.findings(),
        }

    def __str__(self) -> str:
        rows = [COLUMNS, *(_row(one) for one in self.outcomes)]
        widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
        lines = [
            "  ".join(
                cell.ljust(width) if at in (0, len(COLUMNS) - 1) else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *self._summary(), *self._verdict()])

    def _summary(self) -> list[str]:
        gold = bool(self._scored(knows=True))
        unknown = "unknown: nothing earns more than anything else" if gold else "unknown: no item carries an answer"
        hackable = f"{self.hackable:.0%}" if self.hackable is not None else unknown
        same = f"{self.deterministic:.0%}" if self.deterministic is not None else "unknown"
        return [
            f"floor          {self.floor:.4g}",
            f"ceiling        {self.ceiling:.4g}{'' if gold else ', the most that was seen'}",
            f"hackable       {hackable}",
            f"same again     {same}",
            f"latency        {statistics.median(self.seconds) * 1e3:.3g} ms a rollout, at most "
            f"{max(self.seconds) * 1e3:.3g} ms, without a model",
            *(["judged         by a model: here by one that believes what it is told"] if self.judged else []),
        ]

    def _verdict(self) -> list[str]:
        found = self.findings()
        if not found and not self._scored(knows=True):
            return ["", NO_ANSWERS]
        return ["", *(f"- {one}" for one in found)] if found else ["", "nothing found"]

    def _scored(self, *, knows: bool | None = None) -> list[PolicyScores]:
        return [one for one in self.outcomes if one.scores and knows in (None, one.knows)]


def _row(one: PolicyScores) -> tuple[str, ...]:
    if not one.scores:
        return (one.policy, "-", "-", "-", "0", "-", "raises")
    again = f"{one.same}/{one.repeated}"
    numbers = (f"{value:.4g}" for value in (one.mean, min(one.scores), max(one.scores)))
    return (one.policy, *numbers, str(len(one.scores)), again, "knows the answer" if one.knows else "")
