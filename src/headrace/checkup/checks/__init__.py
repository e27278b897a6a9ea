"""The checks: each asks one server in one dialect, and gives findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.checkup.checks import drift, ids, log_probs, several, stops, streaming, tools, versions
from headrace.checkup.checks.subject import Subject
from headrace.checkup.finding import Finding

__all__ = ["CHECKS", "Check", "Subject"]

Check = Callable[[Subject], Awaitable[list[Finding]]]

CHECKS: dict[str, Check] = {
    "ids": ids.check,
    "drift": drift.check,
    "tools": tools.check,
    "log-probs": log_probs.check,
    "streaming": streaming.check,
    "n": several.check,
    "stop": stops.check,
    "versions": versions.check,
}
