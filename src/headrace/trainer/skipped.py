"""What batches brought and was not learned from: its reasons in words, counts over steps, and what to do about it.

One table has the reasons. A row of metrics, the live views, a dry run and the last lines of a run name them from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SkipReason:
    """`unit` is what is counted, in the singular; `why` follows it; `remedy` is what to change, where that helps."""

    unit: str
    why: str
    remedy: str = ""


#: The reasons, by the names of their counts in a row of metrics.
SKIP_REASONS = {
    "skipped_zero_variance": SkipReason(
        "group",
        "with equal rewards only",
        "with equal rewards no answer is better than another: use tasks that the model solves sometimes, a reward with "
        "more than two values, or larger groups (algorithm.skip_zero_variance: false learns from them nevertheless)",
    ),
    "skipped_unrewarded": SkipReason("trajectory", "without a reward", "set rewards before a trajectory is completed"),
    "skipped_untrainable": SkipReason("trajectory", "of which nothing is left to learn from"),
    "skipped_long": SkipReason("sequence", "longer than max_length", "raise max_length"),
    "skipped_media": SkipReason("sequence", "with images or other media, which this model does not read"),
    "skipped_misaligned": SkipReason(
        "sequence",
        "whose advantages or log-probs are not one a token",
        "let environments send advantages, ref_logprobs and distill_* with an entry for each token of a sequence",
    ),
    "skipped_untaught": SkipReason(
        "sequence",
        "without a teacher's ref_logprobs",
        "let environments send ref_logprobs, or name a teacher's server (algorithm.teacher.address)",
    ),
    "skipped_repeated": SkipReason("group", "learned from before"),
    "masked_truncated": SkipReason(
        "answer",
        "that ended by the token limit",
        "raise the answers' max_tokens (algorithm.mask_truncated: false learns from them nevertheless)",
    ),
}
#: How a row of metrics begins the name of a filter, for the trajectories that it left out.
FILTERED = "filtered_"


def filter_metrics(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by the names of filters, by their names in a row of metrics."""
    return {f"{FILTERED}{name}": count for name, count in counts.items()}


def _reasons(counts: Mapping[str, int]) -> dict[str, SkipReason]:
    """`SKIP_REASONS`, and one for each filter that has a count."""
    filters = [name for name in counts if name.startswith(FILTERED)]
    return SKIP_REASONS | {
        name: SkipReason("trajectory", f"by the filter {name.removeprefix(FILTERED)}") for name in filters
    }


class SkippedTotals:
    """Counts of what was skipped, by `SKIP_REASONS` and by filter, and of the groups that were looked at."""

    def __init__(self) -> None:
        self.groups = 0
        self.counts = dict.fromkeys(SKIP_REASONS, 0)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Self:
        """The counts over these rows of metrics."""
        found = cls()
        for row in rows:
            found.add(row)
        return found

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts a step by its row of metrics; a count that a row does not have is 0."""
        self.groups += row.get("groups", 0)
        for name in row:
            if name in SKIP_REASONS or name.startswith(FILTERED):
                self.counts[name] = self.counts.get(name, 0) + row[name]

    def __bool__(self) -> bool:
        return any(self.counts.values())

    def sentence(self) -> str:
        """`skipped out of 8 groups: 3 groups with equal rewards only; 1 trajectory without a reward`; empty where
        nothing was skipped."""
        return f"skipped out of {counted(self.groups, 'group')}: {count_skipped(self.counts)}" if self else ""


def skipped_phrases(counts: Mapping[str, int]) -> list[str]:
    """For each reason that has a count, in words: `3 groups with equal rewards only`."""
    found = ((counts.get(name, 0), reason) for name, reason in _reasons(counts).items())
    return [f"{counted(count, reason.unit)} {reason.why}" for count, reason in found if count]


def count_skipped(counts: Mapping[str, int]) -> str:
    """The phrases of all reasons, as one."""
    return "; ".join(skipped_phrases(counts))


def explain_skipped(counts: Mapping[str, int]) -> str:
    """What was skipped, and what to change so that it is not."""
    ways = [reason.remedy for name, reason in _reasons(counts).items() if counts.get(name) and reason.remedy]
    said = count_skipped(counts)
    return ". ".join([f"skipped: {said}" if said else "the batches were empty", *ways])


def counted(count: int, unit: str) -> str:
    """`1 group`, `2 groups`, `2 trajectories`."""
    if count == 1:
        return f"1 {unit}"
    return f"{count} {unit.removesuffix('y')}ies" if unit.endswith("y") else f"{count} {unit}s"
