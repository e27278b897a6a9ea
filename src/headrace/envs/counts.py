"""What happened in an environment since it began: work, what went wrong with it, and why groups were not sent."""

from __future__ import annotations

import logging
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("headrace.envs")

#: Tracebacks that are kept to be looked at.
KEPT = 16


@dataclass(slots=True)
class Counts:
    items: int = 0
    groups: int = 0
    #: Of every group that was taken to be sent.
    sequences: int = 0
    scores: float = 0.0
    #: Things that failed, by what they were: rollout, timeout, rubbish, evaluate, save_checkpoint, ...
    failed: Counter[str] = field(default_factory=Counter)
    #: Groups that were not sent, by reason.
    skipped: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    paused_s: float = 0.0
    evaluations: int = 0
    tracebacks: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))

    def fail(self, what: str, error: BaseException) -> None:
        """Counts a failure and logs it with its traceback."""
        self.failed[what] += 1
        self.tracebacks.append("".join(traceback.format_exception(error)))
        log.error("%s failed: %s", what, str(error) or type(error).__name__, exc_info=error)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around code of the author's, or work beside the work, that must not take the environment down."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)
