"""What a simulated run came to: rates, the trainer's waits, staleness, what was dropped, which lengths survived."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

#: A part that is busy for more than this share of the time is what a larger run would wait for first.
NEARLY_FULL = 0.8
#: The parts of the rollouts, by length, whose survival is told apart.
LENGTH_BINS = 4


class Survivors(msgspec.Struct, frozen=True):
    """Which rollouts the trainer came to learn from, by their length in tokens. `shares` has one share for each quarter
    of the rollouts that ended, the shortest first; `longest` is that of the longest tenth."""

    shares: tuple[float, ...]
    longest: float
    #: The mean length of what was trained on over that of all that ended.
    length_ratio: float

    @classmethod
    def of(cls, ended: Sequence[tuple[int, bool]]) -> Survivors:
        """`ended` has the length of each rollout whose fate is known, and whether it was trained on."""
        if not ended:
            return cls((1.0,) * LENGTH_BINS, 1.0, 1.0)
        found = sorted(ended)
        cuts = [round(len(found) * at / LENGTH_BINS) for at in range(LENGTH_BINS + 1)]
        shares = tuple(_share(found[begin:end]) for begin, end in pairwise(cuts))
        trained = [tokens for tokens, used in found if used]
        mean = sum(tokens for tokens, _ in found) / len(found)
        ratio = sum(trained) / len(trained) / mean if trained and mean else 1.0
        return cls(shares, _share(found[-max(1, len(found) // 10) :]), ratio)


def _share(part: Sequence[tuple[int, bool]]) -> float:
    return sum(used for _, used in part) / len(part) if part else 1.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the second half of a simulated run came to, when it has found its pace; `dropped` are of the whole run."""

    rollouts_s: float
    calls_s: float
    sampled_tokens_s: float
    trained_tokens_s: float
    steps_h: float
    #: The share of the time in which the trainer waits for a batch.
    trainer_waiting: float
    staleness_mean: float
    staleness_max: int
    #: The share of the rollouts that ended and were dropped, by reason.
    dropped: dict[str, float]
    survivors: Survivors
    #: How busy each part is, as a share of all it could do.
    busy: dict[str, float]
    #: Seconds of the 99th percentile call, with all its waiting.
    call_p99_s: float

    @property
    def limit(self) -> str:
        """What a larger run would wait for first; "agents" where everything else has room."""
        part, share = max(self.busy.items(), key=lambda item: item[1])
        return part if share > NEARLY_FULL else "agents"
