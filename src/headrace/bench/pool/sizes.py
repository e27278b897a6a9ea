"""How much a run measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a step and of a queue belong to the meaning of the figures; rounds only make medians steadier."""

    name: str
    prompt: int = 1024
    response: int = 256
    submit: int = 64

    writers: int = 8
    submits_a_writer: int = 12
    durable_rounds: int = 21

    few_groups: int = 10_000
    many_groups: int = 100_000
    fetch_groups: int = 32
    flat_rounds: int = 400

    recovered_steps: int = 100_000
    recover_rounds: int = 5

    trajectories: int = 200
    turns: int = 50
    final_tokens: int = 32_768

    rollouts: int = 8
    http_rounds: int = 40

    ray_submits: int = 50
    naive_calls: int = 400
    ray_rounds: int = 7

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FULL = Sizes("full")
QUICK = Sizes(
    "quick", durable_rounds=11, flat_rounds=100, recover_rounds=3, http_rounds=15, naive_calls=200, ray_rounds=3
)
