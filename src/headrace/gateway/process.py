"""A gateway as a process: its pool opened or found, its port bound, served until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.gateway.settings import Settings
from headrace.gateway.starting import Start
from headrace.gateway.workers import RETRY_S, Workers
from headrace.net.server import (
    LocalOnly,
    Server,
    loopback,
    settle_memory,
)
from headrace.pool.connect import connect
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.tokens import do_without_torch

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
        self._end: Callable[[], None] = lambda: None
        self._failure: Exception | None = None

    def run(self, start: Start) -> None:
        """Serves until SIGTERM or SIGINT; calls under way end first. A second signal ends it at once. Raises why it can
        never take calls, and what `stop` was told."""
        do_without_torch()
        with self._pool() as pool:
            if self._workers > 1:
                self._several(pool, start)
            else:
                self._one(pool, start)
        if self._failure is not None:
            raise self._failure

    def stop(self, error: Exception) -> None:
        """Ends it as a signal would, from any thread; `run` then raises the error."""
        self._failure = self._failure or error
        self._end()

    def _one(self, pool: DataPool | RemotePool, start: Start) -> None:
        remote = isinstance(pool, RemotePool)
        outbox = self._journal / OUTBOX if remote and self._journal is not None else None
        app = create_app(pool, self._settings, outbox_file=outbox, drain_s=self._drain_s)
        gateway: Gateway = app.state.gateway
        gateway.loaded = settle_memory
        gateway.told = None
        local = not self._settings.keyed and loopback(self._host)
        server = Server(LocalOnly(app) if local else app, self._host, self._port, lifespan=True, grace_s=None)
        self._end = server.stop

        def serves(address: str) -> None:
            start.listening(address)
            gateway.tell(_Here(start, address, self.stop))

        server.run(serves)

    def _several(self, pool: DataPool | RemotePool, start: Start) -> None:
        workers = Workers(
            self._settings,
            host=self._host,
            port=self._port,
            count=self._workers,
            pool=pool if isinstance(pool, DataPool) else None,
            pool_address=self._pool_address,
            pool_key=self._pool_key,
            drain_s=self._drain_s,
        )
        self._end = workers.stop
        workers.run(start)

    @contextmanager
    def _pool(self) -> Iterator[DataPool | RemotePool]:
        if self._pool_address is not None:
            with connect(self._pool_address, key=self._pool_key, retry_s=RETRY_S) as remote:
                yield remote  # the gateway says whether it answers, and waits for it
            return
        with DataPool(self._journal, **self._pool_options) as pool:
            yield pool


class _Here:
    """Hears of the gateway in this process, which ends where it can never take calls."""

    def __init__(self, start: Start, address: str, stop: Callable[[Exception], None]) -> None:
        self._start, self._address = start, address
        self.waiting = start.waiting
        self.failed = stop

    def ready(self) -> None:
        self._start.ready(self._address)
