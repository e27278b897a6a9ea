"""Workers' processes, forked from one that has imported what they need: the fork server, of which this has both sides.

Importing takes seconds of a core, and each process that does it holds the libraries once more. The fork server does
nothing else, and has no threads but OpenBLAS', which that library ends before a fork, so that a fork is sound; a worker
listens a fraction of a second after its start. The fork server knows nothing of its workers: where it dies they live
on, and the next one is forked from a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator

#: How the fork server tells the process that it forked.
PID = struct.Struct("=i")
#: What it is asked with, beside the socket that is to be a worker's standard input and output.
FORK = b"f"
#: Bytes of a line that a worker prints; a longer one is taken in parts.
MAX_LINE_BYTES = 64 * 1024


class ForkServerGone(Exception):
    """The fork server ended before it had forked."""


class ForkedWorker:
    """One worker's process, from its parent's side. Its standard input and output are one socket."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._stdout, self._stdin = stdout, stdin
        self._ended = False

    def give_task(self, task: bytes) -> None:
        """Writes its task to its standard input. One that is gone gets none, and its end is noticed by `lines`."""
        with contextlib.suppress(OSError, RuntimeError):  # uvloop's word for a socket that is closed
            self._stdin.write(task)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it is gone."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def lines(self) -> AsyncIterator[bytes]:
        """What it prints, line by line, until its end."""
        with contextlib.suppress(ConnectionError):  # it ended before it had read all that it was told
            async for line in lines_of(self._stdout):
                yield line
        self._ended = True
        self._stdin.close()


class WorkerForkServer:
    """The fork server, from the side of the process that has workers forked: `module` is run as its main module, and
    calls `serve_forks` with the number that is its argument. It is started when it is first needed, and again where it
    is gone."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._over = False

    async def fork(self) -> ForkedWorker:
        """A new worker. Raises `ForkServerGone`, and what the system says where it has no room for one."""
        async with self._one_at_a_time:
            if self._over:
                raise ForkServerGone
            if self._socket is None:
                self._socket = await self._start()
            ours, its = socket.socketpair()
            with its:
                stdout, stdin = await asyncio.open_unix_connection(sock=ours)
                try:
                    pid = await self._ask(self._socket, its)
                except BaseException:
                    stdin.close()  # the end of a worker that was forked nevertheless
                    self._kill()  # an answer that is under way is not the next one's
                    self._forget()
                    raise
            return ForkedWorker(pid, stdout, stdin)

    async def _ask(self, forks: socket.socket, standard: socket.socket) -> int:
        """The process that is forked with this standard input and output."""
        try:
            socket.send_fds(forks, [FORK], [standard.fileno()])
            answer = await asyncio.get_running_loop().sock_recv(forks, PID.size)
        except ConnectionError as error:
            raise ForkServerGone from error
        if not answer:
            raise ForkServerGone
        pid: int = PID.unpack(answer)[0]
        return pid

    async def _start(self) -> socket.socket:
        ours, its = socket.socketpair()
        try:
            ours.setblocking(False)
            # Not as its standard input, of which the event loop would keep a copy that hides the fork server's end.
            command = [sys.executable, "-m", self._module, str(its.fileno())]
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=(its.fileno(),), start_new_session=True
            )
        except BaseException:
            ours.close()
            raise
        finally:
            its.close()
        return ours

    def end(self) -> None:
        """Ends it for good, also one that is still importing: `fork` raises `ForkServerGone`. Workers live on."""
        self._over = True
        self._kill()

    def close(self) -> None:
        """Ends it, when nobody waits for a worker any more."""
        self.end()
        self._forget()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve_forks(number: int) -> bool:
    """In the fork server, once it has imported: forks a worker for each that is asked for on the socket of a number.
    Returns True in a worker, whose standard input and output are the socket that it was asked with, and False once
    nobody can ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets workers that ended
    with socket.socket(fileno=number) as asking:
        while True:
            asked, files, _, _ = socket.recv_fds(asking, len(FORK), 1)
            if not asked:
                return False
            pid = os.fork()
            if pid == 0:
                break
            os.close(files[0])
            with contextlib.suppress(ConnectionError):  # the parent is gone: the next turn says so
                asking.sendall(PID.pack(pid))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # a signal to the fork server's group is not meant for its workers
    os.dup2(files[0], 0)
    os.dup2(files[0], 1)
    os.close(files[0])
    return True


def wait_for_parents_end() -> None:
    """In a worker: returns once its parent is gone, however it ended: its end of our standard input then closes."""
    with contextlib.suppress(ConnectionError):  # it had not read all that was said
        while os.read(0, 4096):
            pass


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A child's lines as they come. One that never ends is given in parts: nobody fills the pipe, and no memory."""
    rest = b""
    while part := await stream.read(MAX_LINE_BYTES):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest
