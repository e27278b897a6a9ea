"""What groups that are gone still owe: trajectories that they expected and never saw.

Such a trajectory is late when it comes, not the first of another group. It is waited for as long as its group would
have been; then the prompt begins anew, or a rollout that never comes would cost every later epoch a group.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Seconds that a trajectory may be late where groups do not time out.
PATIENCE_S = 600.0


class Debts:
    def __init__(self) -> None:
        self._owed: dict[str, tuple[int, float]] = {}  # by prompt_uid: how many, and since when; oldest first

    def __bool__(self) -> bool:
        return bool(self._owed)

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        for prompt, (missing, since) in self._owed.items():
            yield prompt, missing, since

    def owe(self, prompt: str, missing: int, since: float) -> None:
        self._owed.pop(prompt, None)
        if missing > 0:
            self._owed[prompt] = missing, since

    def due(self, prompt: str, now: float, patience_s: float) -> int:
        """How many trajectories of a prompt would be late."""
        missing, since = self._owed.get(prompt, (0, now))
        return missing if now - since < patience_s else 0

    def paid(self, prompt: str) -> None:
        """One of them came."""
        missing, since = self._owed.get(prompt, (0, 0.0))
        if missing > 1:
            self._owed[prompt] = missing - 1, since
        else:
            self._owed.pop(prompt, None)

    def forgive(self, prompt: str) -> None:
        self._owed.pop(prompt, None)

    def postpone(self, seconds: float) -> None:
        """They are owed since then, as it were: the clock was set."""
        self._owed = {prompt: (missing, since + seconds) for prompt, (missing, since) in self._owed.items()}

    def lapse(self, now: float, patience_s: float) -> None:
        """Forgives what is waited for no longer."""
        for prompt in list(self._owed):
            if now - self._owed[prompt][1] < patience_s:
                return
            del self._owed[prompt]
