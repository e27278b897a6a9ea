"""What a server's requests took, for the metrics."""

from __future__ import annotations

from collections import deque

import numpy as np


class Statistics:
    """The latest requests of one kind (training or evaluation) to one server."""

    def __init__(self, length: int) -> None:
        self.timings: deque[float] = deque(maxlen=length)
        self.attempts: deque[int] = deque(maxlen=length)

    def note(self, seconds: float, attempts: int) -> None:
        self.timings.append(seconds)
        self.attempts.append(attempts)

    def metrics(self, name: str, attempts_name: str) -> dict[str, float]:
        if not self.timings:
            return {}
        timings = np.asarray(self.timings)
        return {
            f"{name}_time_avg": float(timings.mean()),
            f"{name}_time_std": float(timings.std()),
            f"{name}_time_99p": float(np.percentile(timings, 99)),
            attempts_name: float(np.mean(self.attempts)),
        }
