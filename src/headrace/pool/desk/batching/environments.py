"""The environments: their weights, group sizes and minimum shares of a batch.

An environment that disconnected keeps its group size, since its groups may still come, and loses its weight and its
share. A silent one loses only its weight. Totals are worked out when an environment changes, not when one is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown

#: No environment is told a smaller weight: it would starve.
LEAST_WEIGHT = 0.01


class Environment(msgspec.Struct, frozen=True):
    group_size: int
    max_token_length: int
    weight: float = 1.0
    min_allocation: float | None = None  # share of every batch
    connected: bool = True
    silent: bool = False

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise InvalidInput(f"group_size must be at least 1, not {self.group_size}")
        for name, value in (("weight", self.weight), ("min_allocation", self.min_allocation)):
            if value is not None and not math.isfinite(value):
                raise InvalidInput(f"{name} must be a finite number, not {value}")

    @property
    def pull(self) -> float:
        return self.max_token_length * max(0.0, self.weight)

    @property
    def share(self) -> float:
        return max(0.0, self.min_allocation or 0.0) if self.connected else 0.0


class Environments:
    def __init__(self) -> None:
        self._known: dict[int, Environment] = {}
        self._changed()

    def __contains__(self, env: object) -> bool:
        return env in self._known

    def __getitem__(self, env: int) -> Environment:
        try:
            return self._known[env]
        except KeyError:
            raise InvalidInput(f"no environment {shown(env)} was connected; connect it first") from None

    def put(self, env: int, environment: Environment) -> None:
        self._known[env] = environment
        self._changed()

    def change(self, env: int, **fields: Any) -> None:
        self.put(env, msgspec.structs.replace(self[env], **fields))

    def _changed(self) -> None:
        known = self._known.values()
        self._pull = sum(one.pull for one in known if one.connected and not one.silent)
        self._shares = {env: one.share for env, one in self._known.items() if one.share > 0}
        self._share = sum(self._shares.values())
        self.group_sizes = {one.group_size for one in known if one.connected}  # of which groups may yet come

    def weight(self, env: int) -> float:
        return max(LEAST_WEIGHT, self[env].pull / self._pull) if self._pull > 0 else LEAST_WEIGHT

    @property
    def unallocated(self) -> float:
        return 1.0 - min(1.0, self._share)

    def minimum(self, env: int | None, batch_size: int) -> int:
        """Sequences of a batch that an environment's share comes to, as it asked for it."""
        return int(batch_size * self._shares.get(env, 0.0)) if env is not None else 0

    def minimums(self, batch_size: int) -> dict[int, int]:
        """Sequences of a batch to be taken first, by environment; shares of more than a batch are scaled down."""
        scale = max(1.0, self._share)
        found = {env: int(batch_size * (share / scale)) for env, share in self._shares.items()}
        return {env: minimum for env, minimum in found.items() if minimum}

    def state(self) -> list[list[Any]]:
        return [[env, *msgspec.structs.astuple(one)] for env, one in self._known.items()]

    @classmethod
    def restored(cls, state: list[list[Any]]) -> Environments:
        environments = cls()
        environments._known = {env: Environment(*fields) for env, *fields in state}
        environments._changed()
        return environments
