"""What `/status-env` tells an environment, so that it can pause before the queue grows too long."""

from __future__ import annotations

import msgspec

from headrace.pool.desk.batching.environments import Environments
from headrace.pool.desk.batching.queue import Queue


class EnvStatus(msgspec.Struct, frozen=True):
    queue_size: int  # its groups, and those of others that a batch may take in place of its own
    env_weight: float
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int


def env_status(env: int, batch_size: int, environments: Environments, queue: Queue, in_vain: int = 0) -> EnvStatus:
    """The numbers for one environment: work in the number of environments that have groups queued. What it posted in
    vain, in sequences, counts as its own: one whose groups fit no batch pauses as it would at a queue that never moves.
    """
    group_size, pack = environments[env].group_size, queue.largest
    own = queue.sequences.get(env, 0) + in_vain
    others = 0
    for other, sequences in queue.sequences.items():
        if other != env:
            packed = -(-sequences // pack) * pack
            others += max(0, packed - environments.minimum(other, batch_size))
    return EnvStatus(
        queue_size=(own + others) // group_size,
        env_weight=environments.weight(env),
        unallocated_fraction=environments.unallocated,
        self_queue_size=own // group_size,
        max_group_size=pack,
    )
