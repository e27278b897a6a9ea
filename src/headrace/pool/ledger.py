"""The conservation ledger: where every step that was ever submitted is now."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Ledger:
    """Where every step went. `submitted = queued + leased + consumed + sum(dropped) + quarantined`, always."""

    __slots__ = ("consumed", "counts", "dropped", "leased", "quarantined", "queued", "submitted")

    def __init__(self) -> None:
        self.submitted = self.queued = self.leased = self.consumed = self.quarantined = 0
        self.dropped: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # what is not a step: duplicates, late rewards, redeliveries, ...

    def as_dict(self) -> dict[str, Any]:
        return {
            "submitted": self.submitted,
            "queued": self.queued,
            "leased": self.leased,
            "consumed": self.consumed,
            "dropped": dict(self.dropped),
            "quarantined": self.quarantined,
        }

    @property
    def balanced(self) -> bool:
        placed = self.queued + self.leased + self.consumed + sum(self.dropped.values()) + self.quarantined
        return self.submitted == placed
