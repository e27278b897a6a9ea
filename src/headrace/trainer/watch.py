"""What a run tells while it goes on, to whoever shows it."""

from __future__ import annotations

from typing import Any

from headrace.trainer.checkpoint import Progress

#: What the loop does when it has no batch; `Watcher.groups` then says how far that is.
AWAITING_BATCH = "waiting for a batch"


class Watcher:
    """Is told by any of the run's threads, and must return at once. This one remembers where the run stands."""

    def __init__(self) -> None:
        self._doing = "starting"
        self._groups = ""
        self._down: dict[str, str] = {}

    @property
    def standing(self) -> str:
        """What the run waits for, or else does, in words."""
        if self._down:
            return "waiting for " + "; ".join(self._down.values())
        if self._doing == AWAITING_BATCH and self._groups:
            return f"{self._doing}: {self._groups}"
        return self._doing

    def ready(self, progress: Progress) -> None:
        """The servers have this run's weights; the first batch is asked for next."""

    def doing(self, words: str) -> None:
        """What the loop does from here on."""
        self._doing = words

    def groups(self, words: str) -> None:
        """How much of the next batch is there, while it is not all."""
        self._groups = words

    def down(self, service: str, words: str | None) -> None:
        """A service (`pool`, `gateway`) does not answer, and why; None: it answers again."""
        self._down = {name: why for name, why in self._down.items() if name != service}
        if words is not None:
            self._down = {**self._down, service: words}

    def step(self, row: dict[str, Any]) -> None:
        """A step's row of the metrics."""
        self._groups = ""

    def stopping(self, by: str) -> None:
        """The run was told to stop."""

    def ending_at_once(self) -> None:
        """The process is ended when this returns."""
