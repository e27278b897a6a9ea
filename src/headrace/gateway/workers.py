"""A gateway of several processes on one port. This is their parent: it owns the pool, and replaces a worker that dies.

Workers hold nothing that the pool does not have, so losing one loses its calls under way and nothing else. A worker
whose parent is gone ends too: it notices that its standard input closed. What concerns all workers goes through
`worker_control`; their processes are made by the `fork_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from headrace import files
from headrace.data.errors import HeadraceError
from headrace.gateway.config_files import read_tenants
from headrace.gateway.fork_server import ForkedWorker, ForkServerGone, WorkerForkServer
from headrace.gateway.settings import GatewaySettings
from headrace.gateway.stamps import SessionStamps
from headrace.gateway.startup import ProcessObserver, WorkerMessage
from headrace.gateway.usage import UsageTable
from headrace.gateway.worker_control import WorkerControl, control_app
from headrace.net.server import address_of, listener
from headrace.pool.embedded import DataPool
from headrace.pool.frame_server import serve_frames
from headrace.pool.http import backup_folder

log = logging.getLogger("headrace.gateway")

#: Seconds for which one call to a pool elsewhere is tried again; the outbox goes on after that.
POOL_RETRY_S = 5
#: Seconds before a worker that died is started again, doubled each time up to the most.
MIN_RESTART_S, MAX_RESTART_S = 0.1, 10.0
#: Seconds that a worker must have lived to have been well: the next restart is quick again.
HEALTHY_AFTER_S = 30.0
#: What the fork server runs.
WORKERS_MODULE = "headrace.gateway.process"
#: Settings that name a file.
FILE_SETTINGS = ("models", "tenants", "reward")
#: The parent's socket, in a folder of its own.
SOCKET_NAME = "control.sock"
#: The pool's, beside it.
POOL_SOCKET_NAME = "pool.sock"
#: The files of what tenants use, of the sessions that are out of date, and of the named calls that are under way.
USAGE_NAME, STAMPS_NAME, NAMED_CALLS_NAME = "usage", "stamps", "named_calls"
#: Bytes of the path that a unix socket can have.
MAX_SOCKET_PATH_BYTES = 107


class WorkerTask(msgspec.Struct):
    """What a worker is told, on one line of its standard input."""

    settings: dict[str, object]
    host: str
    port: int
    pool: str
    pool_key: str | None
    control: str  # the parent's socket
    secret: str
    drain_s: float
    files: dict[str, dict[str, Any]]  # what those that the settings name held
    number: int  # of this worker
    workers: int
    stamps: str  # the file that says which sessions are out of date
    named_calls: str  # the file that says which named calls are under way
    usage: str | None  # the file in which all of them count what tenants use


class Workers:
    """The parent process of `count` workers."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        host: str,
        port: int,
        count: int,
        pool: DataPool | None,
        pool_address: str | None,
        pool_key: str | None,
        drain_s: float,
    ) -> None:
        self._settings = settings
        self._host = host
        self._reserved = listener(host, port, shared=True)
        self.address = address_of(self._reserved)
        self._count = count
        self._pool = pool
        self._pool_address = pool_address
        self._pool_key = pool_key
        self._drain_s = drain_s
        self._secret = secrets.token_hex(32)
        self._fork_server = WorkerForkServer(WORKERS_MODULE)
        self._forked: dict[int, ForkedWorker] = {}
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: set[int] = set()
        self._ready: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._told: str | None = None  # the reason that was told last; None before it was told that they listen
        self._announced = False
        self._failure: Exception | None = None
        self._usage: UsageTable | None = None
        self._usage_path: str | None = None
        self._tenants = 0

    def run(self, start: ProcessObserver) -> None:
        """Serves until SIGTERM, SIGINT or `stop`; raises why a worker can never take calls."""
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run(start))
        finally:
            self._reserved.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends it, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    async def _run(self, start: ProcessObserver) -> None:
        loop = self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        async with AsyncExitStack() as ending:
            folder = ending.enter_context(_socket_folder())
            socket_path = str(Path(folder) / SOCKET_NAME)
            control = WorkerControl(self._secret)
            if self._pool is not None:
                backup_to = partial(backup_folder, self._settings.backups)
                frames = await serve_frames(self._pool, str(Path(folder) / POOL_SOCKET_NAME), backup_to)
                ending.callback(frames.close)
            server = _Quiet(uvicorn.Config(control_app(control), uds=socket_path, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve())
            serving.add_done_callback(self._control_ended)
            while not server.started:
                if serving.done():
                    await serving
                    raise HeadraceError(f"the workers' socket {socket_path} could not be opened; it said why above")
                await asyncio.sleep(0.01)
            SessionStamps.create(Path(folder) / STAMPS_NAME)
            self._open_usage(Path(folder) / USAGE_NAME)
            tasks = [self._task(socket_path, number) for number in range(self._count)]
            keepers = [self._keep(number, task, control, start) for number, task in enumerate(tasks)]
            try:
                await asyncio.gather(*keepers)
            finally:
                self._fork_server.close()
                server.should_exit = True
                await serving
                await control.close()

    def _heard(self, number: int, line: WorkerMessage, start: ProcessObserver) -> None:
        """One worker's line about its start."""
        match line.what:
            case "listening":
                self._listening.add(number)
            case "waiting":
                self._reasons[number] = line.text
            case "ready":
                self._ready.add(number)
            case "failed" if number in self._ready:  # it took the place of one that was: the others go on
                log.error("worker %d is not ready: %s", number, line.error)
                self._forked[number].send(signal.SIGTERM)
            case "failed":
                self._failure = self._failure or line.error
                if not self._ending.is_set():
                    self._end()
        self._tell(start)

    def _tell(self, start: ProcessObserver) -> None:
        """Tells what the workers' first starts come to: all listen; what the first of them waits for that is not ready;
        all are ready."""
        if self._announced or len(self._listening) < self._count:
            return
        if self._told is None:
            self._told = ""
            start.listening(self.address)
        if len(self._ready) == self._count:
            self._announced = True
            start.ready(self.address)
            return
        first = min(number for number in range(self._count) if number not in self._ready)
        reason = self._reasons.get(first, self._told)
        if reason != self._told:
            self._told = reason
            start.waiting(reason)

    def _open_usage(self, path: Path) -> None:
        """Makes the file in which workers count what tenants use, where there are tenants."""
        if self._settings.tenants is not None:
            self._tenants = len(read_tenants(Path(self._settings.tenants)))
            UsageTable.create(path, self._tenants, self._count)
            self._usage = UsageTable(self._tenants, workers=self._count, path=path)
            self._usage_path = str(path)

    def _task(self, socket_path: str, number: int) -> bytes:
        # Another worker must find what this one answered: steps are acknowledged by the pool itself. What calls may
        # hold is shared out, since no worker knows what the others hold.
        share_mb = max(1.0, self._settings.memory_mb / self._count)
        settings = {**self._settings.model_dump(), "ack": "pool", "memory_mb": share_mb}
        port = self._reserved.getsockname()[1]
        pool = self._pool_address or f"frames://{Path(socket_path).with_name(POOL_SOCKET_NAME)}"
        # A worker that is started later reads what the first one read; tenants' keys are written nowhere.
        held = {path: files.read(Path(path)) for name in FILE_SETTINGS if (path := getattr(self._settings, name))}
        task = WorkerTask(
            settings=settings,
            host=self._host,
            port=port,
            pool=pool,
            pool_key=self._pool_key,
            control=socket_path,
            secret=self._secret,
            drain_s=self._drain_s,
            files=held,
            number=number,
            workers=self._count,
            stamps=str(Path(socket_path).with_name(STAMPS_NAME)),
            named_calls=str(Path(socket_path).with_name(NAMED_CALLS_NAME)),
            usage=self._usage_path,
        )
        return msgspec.json.encode(task) + b"\n"

    async def _keep(self, number: int, task: bytes, control: WorkerControl, start: ProcessObserver) -> None:
        """Runs one worker, again and again, until the end."""
        wait = MIN_RESTART_S
        while not self._ending.is_set():
            began = asyncio.get_running_loop().time()
            worker = await self._new_worker(number)
            if worker is None:
                wait = min(2 * wait, MAX_RESTART_S)
                await asyncio.sleep(wait)
                continue
            self._forked[number] = worker
            worker.give_task(task)
            if self._ending.is_set():
                worker.send(signal.SIGTERM)
            ended_itself = False
            async for said in worker.lines():
                try:
                    line = msgspec.json.decode(said, type=WorkerMessage)
                except msgspec.MsgspecError:  # a library's own word
                    log.info("worker %d: %s", number, said.decode(errors="replace"))
                    continue
                ended_itself = line.what == "ended"
                if line.what == "listening" and not await control.add_worker(number, line.text):
                    log.error("worker %d does not hear what the others know, and is started again", number)
                    worker.send(signal.SIGKILL)
                    continue
                self._heard(number, line, start)
            control.remove_worker(number)
            if self._usage is not None:
                self._usage.clear(self._tenants, number)
            if self._ending.is_set():
                return
            if number not in self._listening and ended_itself:  # and so it would each time
                self._end()
                raise HeadraceError("a worker ended before it served; it said why above")
            log.error("worker %d %s and is started again", number, "ended" if ended_itself else "was killed")
            wait = (
                MIN_RESTART_S
                if asyncio.get_running_loop().time() - began > HEALTHY_AFTER_S
                else min(2 * wait, MAX_RESTART_S)
            )
            await asyncio.sleep(wait)

    async def _new_worker(self, number: int) -> ForkedWorker | None:
        """A worker's process; None where another try may have one: the fork server is gone, or the system has no room
        now for a worker that served before. Raises `HeadraceError` where it never did."""
        try:
            return await self._fork_server.fork()
        except ForkServerGone:
            if not self._ending.is_set():
                log.error("worker %d is not started yet: the fork server was killed, and is started again", number)
        except (OSError, MemoryError) as error:
            if number not in self._listening:
                self._end()
                raise HeadraceError(f"a worker cannot be started: {str(error) or 'no memory'}") from error
            log.error("worker %d cannot be started now: %s", number, str(error) or "no memory")
        return None

    def _control_ended(self, serving: asyncio.Task[None]) -> None:
        """Ends the process where its socket is no longer served: its workers could reach neither pool nor control."""
        if not self._ending.is_set() and self._forked:
            why = None if serving.cancelled() else serving.exception()
            said = f"the workers' socket is not served any more ({why or 'its server ended'})"
            self._failure = self._failure or HeadraceError(said)
            self._end()

    def _end(self) -> None:
        """The first time, workers drain; the second time, they end at once."""
        again = self._ending.is_set()
        self._ending.set()
        self._fork_server.end()
        for worker in self._forked.values():
            worker.send(signal.SIGKILL if again else signal.SIGTERM)


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the socket; not in a TMPDIR whose path leaves no room for its name."""
    folder = tempfile.TemporaryDirectory(prefix="headrace-")
    if len(os.fsencode(Path(folder.name) / SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES:
        return folder
    folder.cleanup()
    return tempfile.TemporaryDirectory(prefix="headrace-", dir="/tmp")


class _Quiet(uvicorn.Server):
    """A server whose parent handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
