"""A gateway as a process: its pool opened or found, its port bound, served until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.gateway.app import create_app
from headrace.gateway.settings import Settings
from headrace.gateway.workers import RETRY_S, Workers
from headrace.pool.connect import connect
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.serving import Server, settle_memory

#: The outbox's file, in the folder that --journal names, where the pool is elsewhere.
OUTBOX = "outbox"


class Process:
    """One gateway process, or several on one port."""

    def __init__(
        self,
        settings: Settings,
        *,
        host: str,
        port: int,
        workers: int = 1,
        journal: Path | None = None,
        pool_options: dict[str, Any] | None = None,
        pool_address: str | None = None,
        pool_key: str | None = None,
        drain_s: float = 30,
    ) -> None:
        self._settings = settings
        self._host = host
        self._port = port
        self._workers = workers
        self._journal = journal
        self._pool_options = pool_options or {}
        self._pool_address = pool_address
        self._pool_key = pool_key
        self._drain_s = drain_s

    def run(self, ready: Callable[[str], None] = lambda address: None) -> None:
        """Serves until SIGTERM or SIGINT; calls under way end first. A second signal ends it at once."""
        with self._pool() as pool:
            if self._workers > 1:
                self._several(pool).run(ready)
                return
            remote = isinstance(pool, RemotePool)
            outbox = self._journal / OUTBOX if remote and self._journal is not None else None
            app = create_app(pool, self._settings, outbox_file=outbox, drain_s=self._drain_s)
            app.state.gateway.loaded = settle_memory
            Server(app, self._host, self._port, lifespan=True, grace_s=None).run(ready)

    def _several(self, pool: DataPool | RemotePool) -> Workers:
        return Workers(
            self._settings,
            host=self._host,
            port=self._port,
            count=self._workers,
            pool=pool if isinstance(pool, DataPool) else None,
            pool_address=self._pool_address,
            pool_key=self._pool_key,
            drain_s=self._drain_s,
        )

    @contextmanager
    def _pool(self) -> Iterator[DataPool | RemotePool]:
        if self._pool_address is not None:
            with connect(self._pool_address, key=self._pool_key, retry_s=RETRY_S) as remote:
                remote.stats()  # a pool that is not there is said now, not at the first step
                yield remote
            return
        with DataPool(self._journal, **self._pool_options) as pool:
            yield pool
