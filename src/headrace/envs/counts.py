"""What happened in an environment since it began: work, what went wrong with it, and why groups were not sent."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.data.errors import HeadraceError

log = logging.getLogger("headrace.envs")

#: Tracebacks that are kept to be looked at.
KEPT = 16
#: Seconds between two lines about the same thing: enough to see that it goes on, and few beside what else is logged.
AGAIN_S = 30.0
#: Why a group is not sent, in words, by the name that it is counted under.
REASONS = {
    "equal_scores": "all its scores are equal",
    "too_long": "a sequence is longer than the trainer takes",
    "rubbish": "it is no group",
    "no_group": "nothing came of its item (None)",
}


class GaveUp(HeadraceError):
    """So many items in a row came to nothing that the next would too."""

    code = "gave_up"


class Repeats:
    """Things that happen again and again, each told when it first happens and then by its number, now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: Counter[Hashable] = Counter()
        self._told: dict[Hashable, float] = {}

    def note(self, what: Hashable) -> int | None:
        """How often it has happened where that is to be told now, None where it is not."""
        self._times[what] += 1
        now = self._clock()
        if what in self._told and now - self._told[what] < AGAIN_S:
            return None
        self._told[what] = now
        return self._times[what]


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
    #: Items since the last group that came to nothing, and why the last of them did.
    nothing_in_a_row: int = 0
    last_nothing: str = ""
    pauses: int = 0
    paused_s: float = 0.0
    evaluations: int = 0
    tracebacks: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT))
    repeats: Repeats = field(default_factory=Repeats)

    def fail(self, what: str, error: BaseException) -> None:
        """Counts a failure. One that is new is logged with its traceback; the same one again as a number."""
        self.failed[what] += 1
        self.tracebacks.append("".join(traceback.format_exception(error)))
        said = str(error) or type(error).__name__
        times = self.repeats.note((what, type(error), *_raised_at(error)))
        if times == 1:
            log.error("%s failed: %s", what, said, exc_info=error)
        elif times is not None:
            log.error("%s failed in the same place for the %dth time: %s", what, times, said)

    def skip(self, reason: str) -> None:
        """Counts a group that is not sent. The first of a reason is logged, and their number now and then."""
        self.skipped[reason] += 1
        times = self.repeats.note(reason)
        if times == 1:
            log.info("a group is not sent: %s; more of them are counted", REASONS.get(reason, reason))
        elif times is not None:
            log.info("%d groups were not sent so far: %s", times, REASONS.get(reason, reason))

    def came_to_nothing(self, why: str) -> None:
        """An item failed: one more in a row."""
        self.nothing_in_a_row += 1
        self.last_nothing = why

    def came_to_something(self) -> None:
        """A group was made: what failed before it had another cause than what will fail next."""
        self.nothing_in_a_row = 0

    def give_up_after(self, most: int | None) -> None:
        """Raises `GaveUp` where so many items in a row came to nothing; None: however many."""
        if most is not None and self.nothing_in_a_row >= most:
            raise GaveUp(
                f"{self.nothing_in_a_row} items in a row came to nothing (max_consecutive_failures is {most}), "
                f"the last one with: {self.last_nothing}"
            )

    def tell_skipped(self) -> None:
        """The last word on what was not sent."""
        if sum(self.skipped.values()) > 1:
            said = ", ".join(f"{times} because {REASONS.get(reason, reason)}" for reason, times in self.skipped.items())
            log.info("groups that were not sent, in all: %s", said)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around code of the author's, or work beside the work, that must not take the environment down."""
        try:
            yield
        except Exception as error:
            self.fail(what, error)


def _raised_at(error: BaseException) -> tuple[str, int]:
    """File and line that raised an error: the same place is the same trouble, whatever item its words name."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return (frames[0].filename, frames[0].lineno or 0) if frames else ("", 0)
