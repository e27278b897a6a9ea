"""The demo's pool on Ray: a local cluster that lives as long as the run, with the pool as its actor.

Gateway and trainer are plain processes that join the cluster by its address and reach the pool by its name; another
cluster on the same machine does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["ray_pool"]


@contextmanager
def ray_pool(name: str, journal: Path, channels: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """A journalled pool on a new local cluster: its address, and the cluster's."""
    import ray

    from headrace.pool.ray import DEFAULT_NAMESPACE, actor_address, start_pool, stop_pool

    started = ray.init("local", namespace=DEFAULT_NAMESPACE, include_dashboard=False, log_to_driver=False)
    cluster = str(started.address_info["gcs_address"])
    try:
        start_pool(name, journal=journal, channels=channels, durability="os")
        try:
            yield actor_address(name, cluster), cluster
        finally:
            stop_pool(name)
    finally:
        ray.shutdown()
