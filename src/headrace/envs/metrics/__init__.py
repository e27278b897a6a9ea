"""What an environment tells of itself: where it goes (`log`), and what is in it (`performance`, `rollouts`)."""

from __future__ import annotations

from headrace.envs.metrics.log import MetricsLog
from headrace.envs.metrics.performance import Performance, drained, lengths, spread
from headrace.envs.metrics.rollouts import table

__all__ = ["MetricsLog", "Performance", "drained", "lengths", "spread", "table"]
