"""What a run reports: its state while it runs (`RunWatcher`), a row of metrics for each step (`RunMetrics`), and its
outcome (`RunOutcome`): what was learned from, what was skipped and, where nothing was learned, why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import HeadraceError
from headrace.metrics import (
    JsonLines,
    Row,
    TensorBoard,
    Wandb,
    Writer,
)
from headrace.trainer.checkpoint import Progress
from headrace.trainer.config import LogConfig
from headrace.trainer.skipped import SkippedTotals, counted, explain_skipped

log = logging.getLogger(__name__)

#: What the loop does when it has no batch; `RunWatcher.groups` then says how far that is.
AWAITING_BATCH = "waiting for a batch"


class RunWatcher:
    """Callbacks that any thread of a run calls; they must return at once. This class only remembers the run's state."""

    def __init__(self) -> None:
        self._doing = "starting"
        self._groups = ""
        self._down: dict[str, str] = {}

    @property
    def standing(self) -> str:
        """What the run waits for, or else what it does, as a phrase."""
        if self._down:
            return "waiting for " + "; ".join(self._down.values())
        if self._doing == AWAITING_BATCH and self._groups:
            return f"{self._doing}: {self._groups}"
        return self._doing

    def ready(self, progress: Progress) -> None:
        """The servers have this run's weights; the first batch is fetched next."""

    def doing(self, words: str) -> None:
        """What the loop does from this call on, as a phrase."""
        self._doing = words

    def groups(self, words: str) -> None:
        """How many of the next batch's groups are ready, while it is incomplete."""
        self._groups = words

    def down(self, service: str, words: str | None) -> None:
        """A service (`pool`, `gateway`) does not answer, with the reason; with None it answers again."""
        self._down = {name: why for name, why in self._down.items() if name != service}
        if words is not None:
            self._down = {**self._down, service: words}

    def step(self, row: dict[str, Any]) -> None:
        """A step is done; `row` has its metrics."""
        self._groups = ""

    def stopping(self, by: str) -> None:
        """The run was told to stop, by a signal's name or a caller."""

    def ending_at_once(self) -> None:
        """The process exits when this returns."""


#: After so many steps in a row that learned nothing it is warned of: the first, and then ever more rarely.
WARNED_STEP_COUNTS = frozenset({1, 10, 100, 1_000, 10_000, 100_000})


class NothingLearned(HeadraceError):
    """A run ended without having learned from a single token."""

    code = "nothing_learned"


class RunOutcome:
    """Counts over this process's part of a run; what was done before a resume is not counted."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.skipped = SkippedTotals()
        #: All steps were done before.
        self.nothing_to_do = False
        #: The channel was shut down, and had too little for another batch.
        self.shut_down = False
        self.progress = Progress()
        #: Who stopped the run, if anyone; and what it did or waited for at its end.
        self.stopped_by = self.standing = ""
        self._steps_without_learning = 0

    def add(self, row: dict[str, Any]) -> None:
        """Counts a step by its row of metrics; warns where nothing was learned in it."""
        self.steps += 1
        self.tokens += row["tokens"]
        self.skipped.add(row)
        if row["tokens"]:
            if self._steps_without_learning:
                log.info(
                    "step %d learns again, after %d in which nothing was learned",
                    row["step"],
                    self._steps_without_learning,
                )
            self._steps_without_learning = 0
            return
        self._steps_without_learning += 1
        if self._steps_without_learning in WARNED_STEP_COUNTS:
            which = (
                "step"
                if self._steps_without_learning == 1
                else f"{self._steps_without_learning} steps in a row, the last"
            )
            log.warning("nothing was learned in %s %d: %s", which, row["step"], explain_skipped(row))

    def ended(self, progress: Progress, stopped_by: str, standing: str) -> None:
        """Sets how the run ended: its progress, who stopped it, and what it did or waited for then."""
        self.progress, self.stopped_by, self.standing = progress, stopped_by, standing

    def check(self) -> None:
        """Raises `NothingLearned`, with the reason, where there was something to learn and nothing was learned."""
        if self.tokens or self.nothing_to_do:
            return
        if self.steps:
            raise NothingLearned(
                f"nothing was learned in {counted(self.steps, 'step')}: {explain_skipped(self.skipped.counts)}"
            )
        if self.shut_down:
            raise NothingLearned(f"nothing was learned: the channel was shut down, {self.standing}")
        raise NothingLearned(f"nothing was learned: stopped by {self.stopped_by} while {self.standing}")

    def sentences(self) -> list[str]:
        """The outcome as sentences for the terminal."""
        done = self.progress
        said = [f"{done.step} steps, version {done.version}, {done.trajectories} trajectories, {done.tokens} tokens"]
        if self.skipped:
            said.append(self.skipped.sentence())
        if self.nothing_to_do:
            said.append("there was nothing to do: all steps were done before")
        elif self.shut_down:
            said.append("the channel was shut down and has too few groups for another batch")
        return said


class RunMetrics:
    """Writes each row to all writers of a run: `metrics.jsonl`, and TensorBoard and wandb where they are configured."""

    def __init__(self, run: Path, config: LogConfig, settings: Row) -> None:
        self._writers: list[Writer] = [JsonLines(run / "metrics.jsonl")]
        if config.tensorboard:
            self._writers.append(TensorBoard(run / "tensorboard"))
        if config.wandb is not None:
            self._writers.append(Wandb(config.wandb, run, name=run.name, config=settings))

    def write(self, row: Row) -> None:
        for writer in self._writers:
            writer.write(row)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def truncate_metrics(run: Path, step: int) -> None:
    """Deletes the lines of `metrics.jsonl` after a step, and incomplete ones: a resumed run writes them again."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and orjson.loads(line)["step"] <= step:
                kept.append(line)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
    path.write_bytes(b"".join(kept))
