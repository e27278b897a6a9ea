"""A file of scored groups, one JSON object a line as environments write them, as a pool to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from headrace.dashboard.about import About, AboutSection, AboutTable, Cell
from headrace.data.errors import InvalidInput
from headrace.data.scored.piece import ScoredGroup
from headrace.data.scored.read import read_group
from headrace.data.scored.steps import to_steps
from headrace.data.step import Step
from headrace.pool.embedded import DataPool

#: How the names of such files end.
SUFFIX = ".jsonl"
#: Bytes of groups that are read: a browser is slow with more. The rest stays in the file.
MAX_BYTES = 64_000_000
#: Rows of the table of scores.
SCORE_RANGES = 10


class GroupsFile:
    """The groups of a file in a pool of their own, in `pool`, which is to be closed; `about` says what they are.

    A group of four is in the channel `groups of 4`, its prompt is `group N` by its place in the file. Raises
    `InvalidInput` where the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unread, self._left_out, self._groups = 0, 0, 0
        self._scores: list[float] = []
        self._tokens, self._trained = 0, 0
        self.pool = DataPool()
        sizes: Counter[int] = Counter()
        for number, group in self._read():
            try:
                steps = to_steps(group.piece, f"group {number}")
            except InvalidInput:
                self._unread += 1
                continue
            channel = f"groups of {group.sequences}"
            if not sizes[group.sequences]:
                self.pool.configure(channel, n_rollouts=group.sequences)
            sizes[group.sequences] += 1
            self.pool.submit_steps(steps, channel=channel)
            self._note(steps)

    def about(self) -> About:
        """What the file holds, in figures, and what of it is not shown."""
        scores = self._scores
        outcome = f"{self._groups:,} groups of {len(scores):,} rollouts"
        if scores:
            mean = sum(scores) / len(scores)
            outcome += f": the mean score is {mean:.3g}, from {min(scores):.3g} to {max(scores):.3g}"
        said = [f"{self._tokens:,} tokens, of which {self._trained:,} are trained on. The file is {self.path}."]
        if self._left_out:
            said.append(f"{self._left_out:,} more groups are in the file, and not on this page.")
        if self._unread:
            said.append(f"{self._unread:,} lines of the file are no groups.")
        tables = [_ranges(scores)] if scores else []
        return About(self.path.stem, f"{outcome}.", [AboutSection("Scores", said, tables)])

    def _read(self) -> Iterator[tuple[int, ScoredGroup]]:
        size = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate((one for one in file if one.strip()), 1):
                    size += len(line)
                    if size > MAX_BYTES:
                        self._left_out += 1
                        continue
                    try:
                        yield number, read_group(line)
                    except InvalidInput:
                        self._unread += 1
        except OSError as error:
            raise InvalidInput(f"{self.path} cannot be read: {error.strerror}") from None

    def _note(self, steps: list[Step]) -> None:
        self._groups += 1
        for step in steps:
            if step.is_last:
                self._scores.append(step.reward or 0.0)
                self._tokens += len(step.prompt_ids) + len(step.response_ids)
            self._trained += len(step.response_ids) if step.trainable else 0


def _ranges(scores: list[float]) -> AboutTable:
    """How many rollouts have a score of each range."""
    low, high = min(scores), max(scores)
    width = (high - low) / SCORE_RANGES
    if not width:
        return AboutTable(["score", "rollouts"], [[f"{low:.3g}", len(scores)]], bars=True)
    counts = Counter(min(int((score - low) / width), SCORE_RANGES - 1) for score in scores)
    rows: list[list[Cell]] = [
        [f"{low + at * width:.3g} to {low + (at + 1) * width:.3g}", counts[at]] for at in range(SCORE_RANGES)
    ]
    return AboutTable(["score", "rollouts"], rows, bars=True)
