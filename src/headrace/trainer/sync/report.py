"""What a sync came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """One publish, as it ended.

    seconds     in all, the weights' copy before the pause included
    hold_s      from the pause asked for to the resume answered: the longest that a call was held
    gap_max     largest difference of a log-prob between a server and the trainer; None where it was not verified
    gap_mean    the mean over tokens and servers
    failed      servers that were taken out, each with the reason
    """

    version: int
    mode: str
    seconds: float
    hold_s: float
    gap_max: float | None = None
    gap_mean: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
