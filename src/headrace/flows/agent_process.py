"""Agents in processes of their own, so that a crash, a hang or a flood of output is their own.

`CommandAgent` runs a command line for every rollout. `FunctionAgent` calls a Python function in warm workers
(`agent_worker.py`): as many as rollouts run at once, each used again, and replaced where its agent broke it. Whatever
ends a rollout, all processes of its group are gone afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.data.errors import InvalidInput
from headrace.flows.agent_job import AgentJob, load_agent_function
from headrace.flows.agent_worker import WorkerAnswer
from headrace.flows.flow import AgentFailed
from headrace.processes import begin_as_child, ending_words

log = logging.getLogger("headrace.flows")

#: Bytes of an agent's output that are kept: its end, some hundred lines.
TAIL_BYTES = 8_192
#: Bytes that are read of it at once.
READ_BYTES = 65_536
#: Seconds that a command may take to end once it is told to, before it is killed: enough to end what it started.
GRACE_S = 2.0
#: Seconds that are waited for the last output of a process that has ended, and for word of how it did: another process,
#: which left its group, may hold its pipe.
LAST_OUTPUT_S = 2.0
#: Seconds for the agent's file to be imported, and for a worker to be forked, on a busy machine.
START_S = 300.0
#: Bytes of one line from a worker: an answer, whose texts are bounded.
MAX_LINE = 1 << 20


class OutputTail:
    """The end of what a process prints. It is read as it comes, however much it is, and nobody waits for it."""

    def __init__(self) -> None:
        self._kept = bytearray()

    async def drain(self, reader: asyncio.StreamReader) -> None:
        """Reads to the end."""
        with suppress(OSError):  # a connection that was reset is one that ended
            while data := await reader.read(READ_BYTES):
                self._kept += data
                del self._kept[:-TAIL_BYTES]

    def text(self) -> str:
        """What is kept."""
        return self._kept.decode(errors="replace").strip()

    def clear(self) -> None:
        """Forgets what was printed so far."""
        self._kept.clear()


def agent_environment(**more: str) -> dict[str, str]:
    """This process's environment without keys of Headrace's, of which an agent gets its own and no other."""
    kept = {k: v for k, v in os.environ.items() if not (k.startswith("HEADRACE_") and k.endswith("_KEY"))}
    return {**kept, **more}


class CommandAgent:
    """A command line, run once for each rollout in the configuration's folder, with the task in its environment and on
    stdin. Raises `InvalidInput` where there is no such program."""

    def __init__(self, command: str | list[str], base: Path) -> None:
        self._arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        self._base = base.resolve()
        if not "".join(command).strip():
            raise InvalidInput("agent.command is empty; it is a command line such as 'bash agent.sh'")
        if isinstance(command, list) and shutil.which(command[0]) is None:
            if not (self._base / command[0]).is_file():
                raise InvalidInput(f"agent.command: there is no program {command[0]!r}")
            self._arguments[0] = str(self._base / command[0])

    async def play(self, job: AgentJob) -> None:
        """Runs the command to its end; raises `AgentFailed` unless it ends with code 0."""
        tail = OutputTail()
        with tempfile.TemporaryFile() as stdin:  # a file: a command that does not read it holds up nobody
            stdin.write(job.task_json() + b"\n")
            stdin.seek(0)
            async with self._started(job, stdin.fileno(), tail) as process:
                code = await process.wait()
        if code:
            reason = "exit_code" if code > 0 else "crashed"
            raise AgentFailed(reason, f"its process {ended(code)}", tail.text())

    async def aclose(self) -> None:
        """Nothing runs between rollouts."""

    @asynccontextmanager
    async def _started(self, job: AgentJob, stdin: int, tail: OutputTail) -> AsyncIterator[asyncio.subprocess.Process]:
        """The process; at the block's end it and its group are gone, and its last output is kept."""
        loop = asyncio.get_running_loop()
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb"))
        try:
            process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=stdin,
                stdout=writing,
                stderr=writing,
                cwd=self._base,
                env=agent_environment(**job.environment()),
                start_new_session=True,
                preexec_fn=begin_as_child,
            )
        except BaseException as error:
            pipe.close()
            if not isinstance(error, OSError):
                raise
            raise AgentFailed("crashed", f"it cannot be started: {error}") from error
        finally:
            os.close(writing)
        draining = asyncio.create_task(tail.drain(reader))
        try:
            yield process
        except asyncio.CancelledError as error:
            error.add_note(tail.text())
            raise
        finally:
            await asyncio.shield(self._ended(process))
            await asyncio.wait([draining], timeout=LAST_OUTPUT_S)
            draining.cancel()
            pipe.close()

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        """Ends a process that runs, gently first, and then all of its group."""
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()


class AgentWorker:
    """A process that plays one rollout at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.output = OutputTail()
        loop = asyncio.get_running_loop()
        self.connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        self.drained = asyncio.Event()

    async def play(self, job: AgentJob) -> WorkerAnswer:
        """The worker's answer; raises `AgentFailed` where its process ends before it."""
        async with asyncio.timeout(START_S):
            reader, writer = await self.connected
        self.output.clear()
        try:
            writer.write(msgspec.json.encode(job) + b"\n")
            line = await reader.readline()
        except OSError:
            line = b""
        except asyncio.CancelledError as error:
            error.add_note(self.output.text())
            raise
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=WorkerAnswer)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_OUTPUT_S):
                await self.ended
                await self.drained.wait()
        code = self.ended.result() if self.ended.done() else None
        reason = "exit_code" if code is not None and code > 0 else "crashed"
        raise AgentFailed(reason, f"its process {ended(code)} in the middle of a rollout", self.output.text())

    def close(self) -> None:
        """Closes its connection, which ends an idle one."""
        if self.connected.done() and not self.connected.cancelled() and not self.connected.exception():
            self.connected.result()[1].close()
        else:
            self.connected.cancel()


class FunctionAgent:
    """A Python function, called in workers. Nothing is started before the first rollout."""

    def __init__(self, target: str, base: Path) -> None:
        load_agent_function(target, base)  # what is wrong with it is known now
        self._target, self._base = target, base.resolve()
        self._starting: asyncio.Task[ForkServer] | None = None

    async def play(self, job: AgentJob) -> None:
        """Calls the function in a worker; raises `AgentFailed` where it raises, or its process ends."""
        forking = await self._fork_server()
        worker = forking.idle.pop() if forking.idle else forking.fork()
        try:
            answer = await worker.play(job)
        except BaseException:
            await forking.end(worker)
            raise
        if answer.spent or forking.gone:
            await forking.end(worker)
        else:
            forking.idle.append(worker)
        if answer.reason is not None:
            raise AgentFailed(answer.reason, answer.detail, answer.output)

    async def aclose(self) -> None:
        """Ends all workers."""
        starting, self._starting = self._starting, None
        if starting is None:
            return
        starting.cancel()  # nothing, where it is done
        with suppress(asyncio.CancelledError, AgentFailed):
            await (await starting).aclose()

    async def _fork_server(self) -> ForkServer:
        """The process that forks workers: started by the first that needs one, for all, also where that one is
        cancelled before it is there; and anew where it is gone."""
        known = self._starting
        if known is None or (known.done() and (known.cancelled() or known.exception() or known.result().gone)):
            known = self._starting = asyncio.create_task(self._started(known))
        return await asyncio.shield(known)

    async def _started(self, before: asyncio.Task[ForkServer] | None) -> ForkServer:
        if before is not None and not before.cancelled() and not before.exception():
            await before.result().aclose()
        return await ForkServer.started(self._target, self._base)


class ForkServer:
    """The process that forks workers, from outside: started, told what to do, and ended."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))
        self._output = OutputTail()
        self._workers: dict[int, AgentWorker] = {}
        self._next = 0
        self._server: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None
        self._control: asyncio.StreamWriter | None = None
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        #: Workers that wait for a rollout.
        self.idle: list[AgentWorker] = []
        self.gone = False

    @classmethod
    async def started(cls, target: str, base: Path) -> ForkServer:
        """A process that has imported the agent. Raises `AgentFailed` where it cannot."""
        found = cls()
        try:
            await found._start(target, base)
        except BaseException:
            await found.aclose()
            raise
        return found

    async def _start(self, target: str, base: Path) -> None:
        path = self._folder / "agents"
        self._server = await asyncio.start_unix_server(self._connected, path, limit=MAX_LINE)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace.flows.agent_worker", target, str(base), str(path)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=base,
            env=agent_environment(PYTHONUNBUFFERED="1"),
            start_new_session=True,
            preexec_fn=begin_as_child,
        )
        assert self._process.stderr is not None
        self._draining = asyncio.create_task(self._output.drain(self._process.stderr))
        ending = asyncio.create_task(self._process.wait())
        waited: list[asyncio.Future[Any]] = [self._ready, ending]
        await asyncio.wait(waited, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        told = self._ready.result() if self._ready.done() else {"failed": "its process did not start"}
        if "failed" in told:
            raise AgentFailed("crashed", told["failed"], self._output.text())

    def fork(self) -> AgentWorker:
        """A new worker, which is connected soon."""
        self._next += 1
        worker = self._workers[self._next] = AgentWorker(self._next)
        self._tell({"fork": worker.number})
        return worker

    async def end(self, worker: AgentWorker) -> None:
        """Ends a worker and all that it started."""
        self._kill(worker)
        if not self.gone:
            await asyncio.wait([worker.ended], timeout=LAST_OUTPUT_S)

    def _kill(self, worker: AgentWorker) -> None:
        worker.close()
        self._tell({"kill": worker.number})

    async def aclose(self) -> None:
        """Ends the process and its workers."""
        self.gone = True
        for worker in list(self._workers.values()):
            self._kill(worker)
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.returncode is None:
            with suppress(TimeoutError):  # it ends by itself, once it has ended its workers
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
            _signal_group(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._draining is not None:
            self._draining.cancel()
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, told: Mapping[str, int]) -> None:
        if self._control is not None and not self._control.is_closing():
            self._control.write(orjson.dumps(told) + b"\n")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process that connects says who it is."""
        try:
            hello = orjson.loads(await reader.readline() or b"{}")
            if "forking" in hello:
                self._control = writer
                await self._hear(reader)
            elif "output" in hello:
                worker = self._workers[hello["output"]]
                await worker.output.drain(reader)
                worker.drained.set()
                writer.close()
            elif "worker" in hello:
                waiting = self._workers[hello["worker"]].connected
                if waiting.cancelled():
                    writer.close()
                else:
                    waiting.set_result((reader, writer))
        except OSError as error:
            log.debug("an agent's process was lost: %s", error)
        except asyncio.CancelledError:
            pass  # the loop ends: asyncio's own callback would tell of it as of an error

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """What the forking process tells, until it is gone."""
        while line := await reader.readline():
            told = orjson.loads(line)
            if "ended" in told:
                worker = self._workers.pop(told["ended"])
                with suppress(ValueError):  # an idle one that something else ended is given no rollout
                    self.idle.remove(worker)
                if not worker.ended.done():
                    worker.ended.set_result(told["status"])
                if not worker.connected.done():
                    worker.connected.set_exception(AgentFailed("crashed", f"its process {ended(told['status'])}"))
                    worker.connected.exception()  # nobody may be waiting
            elif not self._ready.done():
                self._ready.set_result(told)
        self.gone = True
        for worker in self._workers.values():
            if not worker.connected.done():
                worker.connected.set_exception(AgentFailed("crashed", "the process that forks agents ended"))
                worker.connected.exception()


def ended(code: int | None) -> str:
    """How a process ended, in words."""
    return "was lost" if code is None else ending_words(code)


def _signal_group(pid: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, how)
