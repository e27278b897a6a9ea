"""The demo's pool on Ray: a local cluster that lives as long as the run, with the pool as its actor.

Gateway and trainer are plain processes that join the cluster by themselves and reach the pool by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["ray_pool"]


@contextmanager
def ray_pool(name: str, journal: Path, channels: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The address of a journalled pool on a new local cluster."""
    import ray

    from headrace.pool.ray import DEFAULT_NAMESPACE, actor_address, start_pool, stop_pool

    ray.init("local", namespace=DEFAULT_NAMESPACE, include_dashboard=False, log_to_driver=False)
    try:
        start_pool(name, journal=journal, channels=channels, durability="os")
        try:
            yield actor_address(name)
        finally:
            stop_pool(name)
    finally:
        ray.shutdown()
