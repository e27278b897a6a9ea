"""Which groups the next batch takes: packs where the queue's sizes allow it and nobody has a minimum, else by age."""

from __future__ import annotations

from headrace.pool.desk.batching import exact, packs
from headrace.pool.desk.batching.environments import Environments
from headrace.pool.desk.batching.queue import Group, Queue

#: With so many batches' worth queued and too few packs full, the batch is filled by age: environments that pause at a
#: long queue would never fill the packs.
STUCK = 2


def next_batch(
    queue: Queue, environments: Environments, batch_size: int, *, by_age: bool = False
) -> list[Group] | None:
    """Groups of exactly `batch_size` sequences; None where no batch is ready. Larger groups stand in nobody's way."""
    sizes = {size: count for size, count in queue.sizes.items() if size <= batch_size}
    sequences = sum(size * count for size, count in sizes.items())
    if sequences < batch_size:
        return None
    supplies = _supplies(queue, environments.minimums(batch_size), batch_size)
    if len(supplies) == 1 and not by_age and packs.regular(sizes, batch_size):
        chosen = packs.fill(queue, batch_size)
        if chosen is not None or sequences < STUCK * batch_size:
            return chosen
    return exact.fill(batch_size, supplies)


def _supplies(queue: Queue, minimums: dict[int, int], batch_size: int) -> list[exact.Supply]:
    """The groups that fit: of each environment with a minimum apart, as far as it has any, and everybody else's."""
    apart, rest = [], []
    for env, by_size in queue.lanes.items():
        lanes = [(size, lane) for size, lane in by_size.items() if size <= batch_size]
        if env is None or env not in minimums:
            rest += lanes
        elif lanes:
            there = sum(size * len(lane) for size, lane in lanes)
            apart.append((env, exact.Supply(lanes, min(minimums[env], there))))
    apart.sort(key=lambda pair: pair[0])
    return [supply for _, supply in apart] + [exact.Supply(rest)]
