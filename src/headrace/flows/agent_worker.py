"""The processes that Python agents run in: `python -m headrace.flows.agent_worker TARGET BASE SOCKET`.

The first imports the agent's file once, and forks a worker whenever it is told to: what the agent imports is paid for
and held in memory once. A worker plays one rollout at a time until its connection is closed. Each is a process group of
its own, which is ended whole.

All of them connect to the socket of whoever started them, and say first who they are. The forking process is told
`{"fork": N}` and `{"kill": N}`, and tells `{"ready": true}` or `{"failed": ...}`, and `{"ended": N, "status": ...}`
for every worker. A worker is told jobs, and answers each (`WorkerAnswer`); what it prints goes to a second connection.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import orjson

from headrace.data.errors import HeadraceError
from headrace.flows.agent_job import AgentFunction, AgentJob, is_coroutine, load_agent_function
from headrace.processes import end_with_parent

#: Characters of a traceback that are sent: its end.
MAX_TRACEBACK = 4_000
#: Bytes that are read at once: commands are dozens of bytes.
READ_BYTES = 65_536


class WorkerAnswer(msgspec.Struct, frozen=True):
    """How a rollout ended: no `reason` where it went well. `spent`: the agent left threads or processes behind, which
    may go on calling the model; the worker is not used again."""

    reason: str | None = None
    detail: str = ""
    output: str = ""
    spent: bool = False


def connect(path: str, **hello: Any) -> socket.socket:
    """A connection to the socket of the parent, on which it was said who this is."""
    found = socket.socket(socket.AF_UNIX)
    found.connect(path)
    found.sendall(orjson.dumps(hello) + b"\n")
    return found


class ForkingProcess:
    """The process that has imported the agent, and its workers."""

    def __init__(self, control: socket.socket, function: AgentFunction, path: str) -> None:
        self._control, self._function, self._path = control, function, path
        self._workers: dict[int, int] = {}  # numbers by process id
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def serve(self) -> None:
        """Forks and ends workers as it is told, until its parent is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        rest = b""
        while True:
            control = self._control.fileno()
            readable, _, _ = select.select([control, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, READ_BYTES)
                self._reap()
            if control not in readable:
                continue
            data = self._control.recv(READ_BYTES)
            if not data:
                for pid in self._workers:
                    _kill(pid)
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._obey(orjson.loads(line))

    def _obey(self, told: dict[str, int]) -> None:
        if "fork" in told:
            self._fork(told["fork"])
        else:
            for pid in [pid for pid, number in self._workers.items() if number == told["kill"]]:
                _kill(pid)

    def _fork(self, number: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes: others go on
            print(f"a worker cannot be forked: {error}", file=sys.stderr)
            self._control.sendall(orjson.dumps({"ended": number, "status": 1}) + b"\n")
            return
        if pid:
            self._workers[pid] = number
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            end_with_parent(signal.SIGKILL)
            self._control.close()
            os.close(self._woken)
            os.close(self._wake)
            work(self._function, number, self._path)
        finally:
            os._exit(1)  # never back into the parent's loop

    def _reap(self) -> None:
        """Tells how workers ended that have, and ends what they left of their groups."""
        while (ended := _ended_child()) is not None:
            pid, code = ended
            number = self._workers.pop(pid, None)
            if number is not None:  # the agent's file may have started processes of its own
                _kill_group(pid)
                self._control.sendall(orjson.dumps({"ended": number, "status": code}) + b"\n")
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def work(function: AgentFunction, number: int, path: str) -> NoReturn:
    """Plays rollouts in this process until there are no more."""
    _reseed()
    output = connect(path, output=number)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    jobs = connect(path, worker=number)
    for line in jobs.makefile("rb"):
        answer = play(function, msgspec.json.decode(line, type=AgentJob))
        jobs.sendall(msgspec.json.encode(answer) + b"\n")
    os._exit(0)


def play(function: AgentFunction, job: AgentJob) -> WorkerAnswer:
    """Calls the agent for one rollout."""
    os.environ.pop("HEADRACE_TASK", None)  # the last one's, where this one's is too large
    os.environ.update(job.environment())
    before = threading.active_count()
    reason, detail, output = None, "", ""
    try:
        found = function(job.task, job.base_url, **job.arguments(function))
        if is_coroutine(function):
            asyncio.run(found)
    except SystemExit as error:
        if error.code not in (None, 0):
            reason, detail = "exit_code", f"it ended with code {error.code}"
    except BaseException as error:
        reason, detail = "crashed", traceback.format_exception_only(error)[-1].strip()
        output = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    for printed in (sys.stdout, sys.stderr):
        try:
            printed.flush()
        except (OSError, ValueError):
            pass  # closed by the agent
    spent = threading.active_count() > before or _has_children()
    return WorkerAnswer(reason, detail[-MAX_TRACEBACK:], output, spent)


def main(target: str, base: str, path: str) -> int:
    """Imports the agent and forks workers until the parent is gone."""
    os.dup2(2, 1)
    control = connect(path, forking=True)
    try:
        function = load_agent_function(target, Path(base))
    except HeadraceError as error:
        control.sendall(orjson.dumps({"failed": str(error)}) + b"\n")
        return 1
    control.sendall(orjson.dumps({"ready": True}) + b"\n")
    ForkingProcess(control, function, path).serve()
    return 0


def _kill(pid: int) -> None:
    """Ends a worker that was not reaped yet, with all that it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has not become a group's leader yet
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """Ends what is left of the group of a worker that has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ended_child() -> tuple[int, int] | None:
    """A child that has ended, and its exit code or the negative number of its signal; None where none has. Where the
    system lets one look without waiting for it, it is not waited for: until then no other can have its id."""
    try:
        if not hasattr(os, "waitid"):  # not everywhere on macOS
            pid, status = os.waitpid(-1, os.WNOHANG)
            return (pid, os.waitstatus_to_exitcode(status)) if pid else None
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_pid, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _has_children() -> bool:
    """Whether this process has children that nobody waited for; none is waited for here."""
    if not hasattr(os, "waitid"):  # not everywhere on macOS
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reseed() -> None:
    """Random numbers of this worker's own: every fork begins with its parent's. `random` sees to itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
