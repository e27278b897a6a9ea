"""A rollout server of a gateway's own: `headrace engine` as a child process, on a free port of this machine.

It ends with the gateway, also where that is killed, and a gateway whose engine has ended ends too: nobody else would
bring it back.

A gateway as a process: its pool opened or found, its port bound, served until it is told to end.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.startup import ProcessObserver
from headrace.gateway.workers import POOL_RETRY_S, Workers
from headrace.pool.connect import connect
from headrace.pool.embedded import DataPool
from headrace.pool.remote import RemotePool
from headrace.processes import ChildDied, Processes
from headrace.serving import LocalOnly, Server, loopback, settle_memory
from headrace.tokens import do_without_torch

ENGINE_NAME = "engine"


class OwnEngine:
    """The engine while the context lasts. Made and left in the main thread; SIGTERM leaves it as Ctrl-C does."""

    def __init__(self, model: str, *, raw: bool = False) -> None:
        """`raw`: its log-probs are the model's at temperature 1, and not of what was sampled from."""
        self._model = model
        self._mode = "raw_logprobs" if raw else "processed_logprobs"
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-serve-"))
        self._processes = Processes(self._folder)
        self._ending = False
        self._failed = False

    @property
    def log(self) -> Path:
        """What it prints. The file goes with it, unless it ended by itself."""
        return self._folder / f"{ENGINE_NAME}.log"

    def __enter__(self) -> OwnEngine:
        self._before = signal.signal(signal.SIGTERM, _leave)
        self._child = self._processes.start(
            *(ENGINE_NAME, "headrace", "engine", "--model", self._model),
            *("--host", "127.0.0.1", "--port", 0, "--logprobs-mode", self._mode),
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending = True
        signal.signal(signal.SIGTERM, self._before)
        self._processes.__exit__(kind, error, at)
        if not self._failed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def listening(self) -> str:
        """Its address, as soon as it listens; its model may still be loading."""
        try:
            return self._child.listening(ENGINE_NAME)
        except ChildDied as error:
            raise self._died(error) from None

    def watch(self, process: GatewayProcess) -> None:
        """Stops a gateway's process when the engine ends."""

        def wait() -> None:
            self._child.process.wait()
            if self._ending:
                return
            try:
                self._child.check()
            except ChildDied as error:
                process.stop(self._died(error))

        threading.Thread(target=wait, name="headrace-engine", daemon=True).start()

    def _died(self, error: ChildDied) -> HeadraceError:
        self._failed = True
        said = error.tail.splitlines()[-1:] or ["nothing"]
        return HeadraceError(f"{error}; it said: {said[0].removeprefix('headrace: ')} (its log is {self.log})")


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


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
        gateway.loaded = settle_memory
        gateway.told = None
        local = not self._settings.keyed and loopback(self._host)
        server = Server(LocalOnly(app) if local else app, self._host, self._port, lifespan=True, grace_s=None)
        self._end = server.stop

        def serves(address: str) -> None:
            start.listening(address)
            gateway.tell(_Here(start, address, self.stop))

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


class _Here:
    """Hears of the gateway in this process, which ends where it can never take calls."""

    def __init__(self, start: ProcessObserver, address: str, stop: Callable[[Exception], None]) -> None:
        self._start, self._address = start, address
        self.waiting = start.waiting
        self.failed = stop

    def ready(self) -> None:
        self._start.ready(self._address)
