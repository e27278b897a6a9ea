"""Our Trajectory API, in the original's place: on a pool in this process, whose desk is empty for every scenario.

The original lets pages of any origin call; ours those that it was told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.atropos.wire import PAGE
from tests.gateway.kit import serving

from headrace import DataPool
from headrace.api import TrajectoryApiSettings, create_app


@contextmanager
def ours() -> Iterator[tuple[DataPool, str]]:
    with DataPool() as pool, serving(create_app(pool, TrajectoryApiSettings(allow_origin=[PAGE]))) as address:
        yield pool, address
