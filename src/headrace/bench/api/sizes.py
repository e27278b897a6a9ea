"""How much a run measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a group and of a queue belong to the meaning of the figures; rounds only make medians steadier."""

    name: str
    envs: int = 4
    connections: int = 8
    group_size: int = 8
    tokens: int = 1024
    batch_size: int = 128

    flow_groups: int = 320
    flow_rounds: int = 5

    few_groups: int = 1_000
    many_groups: int = 20_000
    many_shared_groups: int = 8_000
    flat_tokens: int = 64
    flat_rounds: int = 200
    share: float = 0.1

    kept_groups: int = 2_000

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FULL = Sizes("full")
QUICK = Sizes("quick", flow_groups=96, flow_rounds=3, flat_tokens=16, flat_rounds=60, kept_groups=600)
