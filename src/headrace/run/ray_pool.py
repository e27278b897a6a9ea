"""A journalled pool on a Ray cluster that lives as long as a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RayPool:
    """The pool's name and address, and its cluster's address."""

    name: str
    address: str
    cluster: str


@contextmanager
def ray_pool(name: str, journal: Path, channels: dict[str, dict[str, Any]]) -> Iterator[RayPool]:
    """A pool as an actor of a new local cluster; both end with the context.

    Gateway and trainer are plain processes that join the cluster by its address and reach the pool by its name; another
    cluster on the same machine does not matter.
    """
    import ray

    from headrace.net.ray_cluster import DEFAULT_NAMESPACE
    from headrace.pool.ray import actor_address, start_pool, stop_pool

    started = ray.init("local", namespace=DEFAULT_NAMESPACE, include_dashboard=False, log_to_driver=False)
    cluster = str(started.address_info["gcs_address"])
    try:
        start_pool(name, journal=journal, channels=channels, durability="os")
        try:
            yield RayPool(name, actor_address(name, cluster), cluster)
        finally:
            stop_pool(name)
    finally:
        ray.shutdown()
