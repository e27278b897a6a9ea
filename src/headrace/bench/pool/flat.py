"""`fetch_flat` and `submit_flat`: a long queue must cost no more than a short one.

Two embedded pools live side by side, one with 10,000 groups of a standard step each, one with 100,000. They are in
memory: a disk's share would be the same in both and hide a difference. Each round submits 64 groups to the one and then
to the other, and fetches as many again, so the queues keep their lengths. What is timed is the call itself.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.pool.load import Load
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median, seconds
from headrace.pool.embedded import DataPool

WARM_UP = 5


def measure(sizes: Sizes, folder: Path) -> Part:
    load = Load(sizes)
    few, many = (_Queue(sizes, load, groups) for groups in (sizes.few_groups, sizes.many_groups))
    in_turn(few.round, many.round, sizes.flat_rounds, warm_up=WARM_UP)
    absolute = {}
    for queue in (few, many):
        absolute[f"submit_ms_{queue.groups}_queued"] = median(queue.submits[WARM_UP:]) * 1e3
        absolute[f"fetch_ms_{queue.groups}_queued"] = median(queue.fetches[WARM_UP:]) * 1e3
    return Part(
        {
            "fetch_flat": median(many.fetches[WARM_UP:]) / median(few.fetches[WARM_UP:]),
            "submit_flat": median(many.submits[WARM_UP:]) / median(few.submits[WARM_UP:]),
        },
        absolute,
    )


class _Queue:
    """A pool whose queue has the same length before and after every round."""

    def __init__(self, sizes: Sizes, load: Load, groups: int) -> None:
        self.groups = groups
        self.submits: list[float] = []
        self.fetches: list[float] = []
        self._sizes = sizes
        self._load = load
        self._pool = DataPool(channels={"train": {"max_queue_size": groups + sizes.submit}})
        for at in range(0, groups, sizes.submit):
            self._pool.submit_steps(load.steps(min(sizes.submit, groups - at)))

    def round(self) -> float:
        sizes, pool = self._sizes, self._pool
        steps = self._load.steps(sizes.submit)
        self.submits.append(seconds(lambda: pool.submit_steps(steps)))
        left = sizes.submit
        fetches = []
        while left > 0:
            size = min(left, sizes.fetch_groups)
            took = seconds(lambda size=size: pool.fetch_batch(size, timeout=0))  # type: ignore[misc]
            if size == sizes.fetch_groups:
                fetches.append(took)
            left -= size
        self.fetches.append(median(fetches))
        return self.submits[-1] + self.fetches[-1]
