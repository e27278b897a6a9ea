"""What a run came to: what it learned from, what it left out, and, where it learned nothing, why."""

from __future__ import annotations

import logging
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.trainer.checkpoint import Progress

log = logging.getLogger(__name__)

#: What a row of the metrics counts as left out, by its name there: what it is, and why.
LEFT_OUT = {
    "skipped_zero_variance": ("group", "with equal rewards only"),
    "skipped_unrewarded": ("trajectory", "without a reward"),
    "skipped_untrainable": ("trajectory", "without a token to learn from"),
    "skipped_long": ("sequence", "longer than max_length"),
    "skipped_media": ("sequence", "with images or other media"),
    "skipped_repeated": ("group", "learned from before"),
}
#: What to do about it.
WAY_OUT = {
    "skipped_zero_variance": (
        "with equal rewards no answer is better than another: use tasks that the model solves sometimes, a reward with "
        "more than two values, or larger groups (algorithm.skip_zero_variance: false learns from them nevertheless)"
    ),
    "skipped_unrewarded": "set rewards before a trajectory is completed",
    "skipped_long": "raise max_length",
}
#: Of steps in a row that learned nothing, these are told: the first, and then ever more rarely.
TOLD = frozenset({1, 10, 100, 1_000, 10_000, 100_000})


class NothingLearned(HeadraceError):
    """A run ended without having learned from a single token."""

    code = "nothing_learned"


class Outcome:
    """Counts over this life of a run, which an earlier life's are no part of."""

    def __init__(self) -> None:
        self.steps = self.groups = self.tokens = 0
        self.left: dict[str, int] = dict.fromkeys(LEFT_OUT, 0)
        #: All steps were done before.
        self.nothing_to_do = False
        #: The channel was shut down, and had too little for another batch.
        self.shut_down = False
        self.progress = Progress()
        #: Who stopped the run; empty where nobody did. And what it did or waited for at its end.
        self.stopped_by = self.standing = ""
        self._barren = 0

    def add(self, row: dict[str, Any]) -> None:
        """Counts a step by its row of the metrics, and warns where nothing was learned in it."""
        self.steps += 1
        self.groups += row["groups"]
        self.tokens += row["tokens"]
        for name in self.left:
            self.left[name] += row[name]
        if row["tokens"]:
            if self._barren:
                log.info("step %d learns again, after %d in which nothing was learned", row["step"], self._barren)
            self._barren = 0
            return
        self._barren += 1
        if self._barren in TOLD:
            which = "step" if self._barren == 1 else f"{self._barren} steps in a row, the last"
            log.warning("nothing was learned in %s %d: %s", which, row["step"], explained(row))

    def ended(self, progress: Progress, stopped_by: str, standing: str) -> None:
        self.progress, self.stopped_by, self.standing = progress, stopped_by, standing

    def check(self) -> None:
        """Raises `NothingLearned`, with the reason, where this life of the run learned nothing and could have."""
        if self.tokens or self.nothing_to_do:
            return
        if self.steps:
            raise NothingLearned(f"nothing was learned in {_number(self.steps, 'step')}: {explained(self.left)}")
        if self.shut_down:
            raise NothingLearned(f"nothing was learned: the channel was shut down, {self.standing}")
        raise NothingLearned(f"nothing was learned: stopped by {self.stopped_by} while {self.standing}")

    def sentences(self) -> list[str]:
        """How it ended, for people."""
        done = self.progress
        said = [f"{done.step} steps, version {done.version}, {done.trajectories} trajectories, {done.tokens} tokens"]
        if any(self.left.values()):
            said.append(f"left out of {_number(self.groups, 'group')}: {left_out(self.left)}")
        if self.nothing_to_do:
            said.append("there was nothing to do: all steps were done before")
        elif self.shut_down:
            said.append("the channel was shut down and has too few groups for another batch")
        return said


def left_out(counts: dict[str, Any]) -> str:
    return ", ".join(f"{_number(counts[name], what)} {why}" for name, (what, why) in LEFT_OUT.items() if counts[name])


def explained(counts: dict[str, Any]) -> str:
    """What was left out, and what would help."""
    found = [name for name in LEFT_OUT if counts[name]]
    ways = [WAY_OUT[name] for name in found if name in WAY_OUT]
    return "; ".join([f"left out were {left_out(counts)}" if found else "the batches were empty", *ways])


def _number(count: int, what: str) -> str:
    if count == 1:
        return f"1 {what}"
    return f"{count} {what.removesuffix('y')}ies" if what.endswith("y") else f"{count} {what}s"
