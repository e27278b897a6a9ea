"""How much a run measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a conversation belong to the meaning of the figures; rounds only make medians steadier.

    A word is a token, and a turn adds about ten more of the chat format's.
    """

    name: str
    turns: int = 4
    first_words: int = 490
    more_words: int = 24
    sampled: int = 128

    many_callers: int = 64
    some_callers: int = 16
    trajectories_a_caller: int = 2
    throughput_rounds: int = 15

    lone_trajectories: int = 10
    lone_rounds: int = 15

    short_words: int = 590
    long_history: int = 32_000
    long_turn_words: int = 500
    history_calls: int = 4
    history_rounds: int = 9

    ray_rounds: int = 15

    first_token_ms: float = 20
    streams: int = 5
    stream_rounds: int = 9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FULL = Sizes("full")
QUICK = Sizes(
    "quick",
    throughput_rounds=5,
    lone_rounds=5,
    history_rounds=5,
    ray_rounds=5,
    stream_rounds=5,
)
