"""The environments that post: their weights, group sizes and minimum shares of a batch, and what `/status-env` tells.

An environment that disconnected keeps its group size, since its groups may still come, and loses its weight and its
share. A silent one loses only its weight. Totals are worked out when an environment changes, not when one is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.pool.scored.queue import GroupQueue

#: The smallest weight that an environment is given, as a fraction of all: with less it would starve.
MIN_WEIGHT = 0.01


class Environment(msgspec.Struct, frozen=True):
    """What one environment registered with; `InvalidInput` for a size or a number that could not be."""

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
    def token_weight(self) -> float:
        """Its weight by the tokens that it may post, as Atropos has it."""
        return self.max_token_length * max(0.0, self.weight)

    @property
    def min_share(self) -> float:
        """The share of every batch that it has a claim to: none once it is disconnected."""
        return max(0.0, self.min_allocation or 0.0) if self.connected else 0.0


class Environments:
    """What every environment that ever connected registered with, by its id, and the totals over them."""

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
        """Takes an environment in, in place of what it registered with before."""
        self._known[env] = environment
        self._changed()

    def change(self, env: int, **fields: Any) -> None:
        self.put(env, msgspec.structs.replace(self[env], **fields))

    def _changed(self) -> None:
        known = self._known.values()
        self._total_weight = sum(one.token_weight for one in known if one.connected and not one.silent)
        self._shares = {env: one.min_share for env, one in self._known.items() if one.min_share > 0}
        self._total_share = sum(self._shares.values())
        self.group_sizes = {one.group_size for one in known if one.connected}  # of which groups may yet come

    def weight(self, env: int) -> float:
        """Its fraction of the weights of all that are connected and not silent."""
        return max(MIN_WEIGHT, self[env].token_weight / self._total_weight) if self._total_weight > 0 else MIN_WEIGHT

    @property
    def unallocated(self) -> float:
        """The fraction of a batch that is no environment's minimum."""
        return 1.0 - min(1.0, self._total_share)

    def asked_minimum(self, env: int | None, batch_size: int) -> int:
        """Sequences of a batch that an environment's share comes to, as it asked for it."""
        return int(batch_size * self._shares.get(env, 0.0)) if env is not None else 0

    def granted_minimums(self, batch_size: int) -> dict[int, int]:
        """Sequences of a batch to be taken first, by environment; shares of more than a batch are scaled down."""
        scale = max(1.0, self._total_share)
        found = {env: int(batch_size * (share / scale)) for env, share in self._shares.items()}
        return {env: minimum for env, minimum in found.items() if minimum}

    def state(self) -> list[list[Any]]:
        """Everything, as plain data for a snapshot."""
        return [[env, *msgspec.structs.astuple(one)] for env, one in self._known.items()]

    @classmethod
    def restored(cls, state: list[list[Any]]) -> Environments:
        """What `state` was taken of."""
        environments = cls()
        environments._known = {env: Environment(*fields) for env, *fields in state}
        environments._changed()
        return environments


class EnvQueueStatus(msgspec.Struct, frozen=True):
    """What an environment is told, so that it can pause before the queue grows too long. Sizes are in its groups."""

    queue_size: int  # its groups, and those of others that a batch may take in place of its own
    env_weight: float
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int


def env_status(
    env: int, batch_size: int, environments: Environments, queue: GroupQueue, unservable: int = 0
) -> EnvQueueStatus:
    """The numbers for one environment: work in the number of environments that have groups queued.

    `unservable`: sequences that it posted and that no batch will hold. They count as its own, so that an environment
    whose groups fit no batch pauses as it would at a queue that never moves.
    """
    group_size, pack = environments[env].group_size, queue.largest
    own = queue.sequences.get(env, 0) + unservable
    others = 0
    for other, sequences in queue.sequences.items():
        if other != env:
            packed = -(-sequences // pack) * pack
            others += max(0, packed - environments.asked_minimum(other, batch_size))
    return EnvQueueStatus(
        queue_size=(own + others) // group_size,
        env_weight=environments.weight(env),
        unallocated_fraction=environments.unallocated,
        self_queue_size=own // group_size,
        max_group_size=pack,
    )
