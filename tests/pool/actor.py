"""The pool's Ray actor, for tests that each want a fresh pool in it."""

from __future__ import annotations

from typing import Any

from headrace import DataPool
from headrace.pool.ray import PoolActor


class RenewedActor(PoolActor):
    async def renew(self, options: dict[str, Any]) -> None:
        """Ends the pool, and who waits in it, and begins another."""
        self._pool.close()
        self._pool = DataPool(**options)
