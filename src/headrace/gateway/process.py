"""A gateway as a process: its pool opened or found, its port bound, served until it is told to end.

With several workers this process is their parent (`workers`), and `python -m headrace.gateway.process` forks them; each
is told on its standard input what to serve.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from headrace import files
from headrace.data.visible import log_to_stderr
from headrace.gateway.app import create_app
from headrace.gateway.fork_server import serve_forks, wait_for_parents_end
from headrace.gateway.gateway import Gateway
from headrace.gateway.named_calls import NamedCalls
from headrace.gateway.served_model import import_libraries
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.stamps import SessionStamps
from headrace.gateway.startup import ProcessObserver, WorkerReporter
from headrace.gateway.usage import UsageTable
from headrace.gateway.worker_control import ControlRelay
from headrace.gateway.workers import POOL_RETRY_S, Workers, WorkerTask
from headrace.net.connection import bounded_connection
from headrace.net.server import LocalOnly, Server, allow_files, loopback, settle_memory
from headrace.pool.connect import connect
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.tokens import do_without_torch

log = logging.getLogger("headrace.gateway")

#: Files of a process that are no connections: libraries', the journal's, the pool's sockets.
OWN_FILES = 256
#: Seconds for which a client may read on after a call has given it up: the connection's own bound comes last.
READ_GRACE_S = 30.0
#: The outbox's file, in the folder that --journal names, where the pool is elsewhere.
OUTBOX_FILE = "outbox"


class GatewayProcess:
    """One gateway process, or several on one port."""

    def __init__(
        self,
        settings: GatewaySettings,
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

    def run(self, start: ProcessObserver) -> None:
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

    def _one(self, pool: DataPool | RemotePool, start: ProcessObserver) -> None:
        remote = isinstance(pool, RemotePool)
        outbox = self._journal / OUTBOX_FILE if remote and self._journal is not None else None
        app = create_app(pool, self._settings, outbox_file=outbox, drain_s=self._drain_s)
        gateway: Gateway = app.state.gateway
        server = _server(app, gateway, self._host, self._port)
        self._end = server.stop

        def serves(address: str) -> None:
            start.listening(address)
            gateway.report_startup(_InProcess(start, address, self.stop))

        server.run(serves)

    def _several(self, pool: DataPool | RemotePool, start: ProcessObserver) -> None:
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
            with connect(self._pool_address, key=self._pool_key, retry_s=POOL_RETRY_S) as remote:
                yield remote  # the gateway says whether it answers, and waits for it
            return
        with DataPool(self._journal, **self._pool_options) as pool:
            yield pool


class _InProcess:
    """Observes the start of the gateway in this process, and ends the process where calls can never be taken."""

    def __init__(self, start: ProcessObserver, address: str, stop: Callable[[Exception], None]) -> None:
        self._start, self._address = start, address
        self.waiting = start.waiting
        self.failed = stop

    def ready(self) -> None:
        self._start.ready(self._address)


def _server(app: ASGIApp, gateway: Gateway, host: str, port: int, *, shared: bool = False) -> Server:
    """What serves a gateway whose observer is given once it listens. `shared`: other processes listen on the port."""
    gateway.loaded = settle_memory
    gateway.observer = None
    settings = gateway.settings
    local = not settings.keyed and loopback(host)
    connection = bounded_connection(_most_connections(settings), settings.idle_s + READ_GRACE_S)
    front = LocalOnly(app) if local else app
    return Server(front, host, port, lifespan=True, grace_s=None, shared=shared, connection=connection)


def _most_connections(settings: GatewaySettings) -> int:
    """How many connections this process holds: as many as the settings say, as far as it may open files. A call has
    two, its own and its server's."""
    wanted = settings.most_connections
    most = (allow_files(OWN_FILES + 2 * wanted) - OWN_FILES) // 2
    if most < wanted:
        log.warning(
            "this process may open so few files that it holds %d connections and not %d; raise `ulimit -n`",
            most,
            wanted,
        )
    return max(1, min(wanted, most))


def fork_workers(number: int) -> None:
    """Imports what workers need, and is each worker that it is asked for on a socket."""
    do_without_torch()
    import_libraries()
    settle_memory()  # a collection would write to pages that all workers share
    if serve_forks(number):
        try:
            run_worker()
        finally:
            WorkerReporter().ended()


def run_worker() -> None:
    """Serves as one of several workers until SIGTERM, or until the parent process is gone."""
    log_to_stderr(f"%(levelname)s %(name)s[{os.getpid()}]: %(message)s")
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        told = stdin.readline()
    if not told:  # the parent is gone
        return
    task = msgspec.json.decode(told, type=WorkerTask)
    for path, held in task.files.items():
        files.hand_on(path, held)
    with_its_pool = task.pool.startswith("frames://")  # which nobody but the parent serves
    threading.Thread(target=_watch_parent, args=(with_its_pool,), name="headrace-parent", daemon=True).start()
    with connect(task.pool, key=task.pool_key, retry_s=POOL_RETRY_S) as pool:
        settings = GatewaySettings.model_validate(task.settings)
        app = create_app(pool, settings, drain_s=task.drain_s)
        relay = ControlRelay(app, socket=task.control, secret=task.secret)
        gateway: Gateway = app.state.gateway
        gateway.others = relay
        gateway.sessions.stamps = SessionStamps(Path(task.stamps))
        gateway.named_calls = NamedCalls(Path(task.named_calls))
        if task.usage is not None:
            tenants = len(gateway.access.tenants)
            table = UsageTable(tenants, workers=task.workers, worker=task.number, path=Path(task.usage))
            gateway.access.share_usage(table)
        server = _server(relay, gateway, task.host, task.port, shared=True)
        reporter = WorkerReporter()

        def serves(address: str) -> None:
            reporter.listening(server.private)
            gateway.report_startup(reporter)

        server.run(serves)


def _watch_parent(with_its_pool: bool) -> None:
    """Ends this process once the parent is gone. Calls under way end first, unless the pool has gone with the parent:
    no step of theirs can be kept any more, and their agents try again elsewhere as soon as their connections break."""
    wait_for_parents_end()
    os.kill(os.getpid(), signal.SIGKILL if with_its_pool else signal.SIGTERM)


if __name__ == "__main__":
    fork_workers(int(sys.argv[1]))
