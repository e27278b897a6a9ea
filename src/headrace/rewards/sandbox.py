"""Programs that nobody has read: run in a process that may compute, within limits, and do nothing else.

A program gets a scratch folder, an environment without anything of ours, and limits of time, memory, files and
processes. It has no network, writes nothing outside of its folder, reads Python and the system's libraries, signals no
process but its own, and is gone with all its children when `run` returns, or the process that called it ends, however
that does. `sandbox_child.py` says by which of Linux' means; none needs root. Where one cannot be had (an old kernel),
nothing is run and `SandboxUnavailable` says what is missing, unless `trusted` is set; on another system nothing is run
at all.

What it is not: a virtual machine. A hole in the kernel is a hole in it.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from headrace.data.errors import HeadraceError

CHILD = Path(__file__).with_name("sandbox_child.py")
#: What has to hold before a program that is not trusted is run.
MUST_HOLD = ("files", "network", "processes", "signals")
#: Bytes read from a pipe at once.
PART = 1 << 16
#: Seconds in which what was killed lets go of its pipes; the kernel needs milliseconds.
END_S = 10.0


class SandboxUnavailable(HeadraceError):
    """This machine cannot confine a program, or the sandbox could not be started."""

    code = "sandbox_unavailable"

    def __init__(self, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        #: Whether another attempt could end otherwise.
        self.again = again


class SandboxLimits(BaseModel):
    """What a program may use up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_s: int = Field(10, ge=1, description="seconds of processor time of each process")
    wall_s: float = Field(
        60.0, gt=0, description="seconds by the clock: for what sleeps or waits, not for a busy machine"
    )
    memory_mb: int = Field(1024, ge=64, description="address space of each process, in MB")
    files_mb: int = Field(64, ge=1, description="size of a file, and of all together where namespaces hold, in MB")
    files: int = Field(256, ge=16, description="open files, and files at all where namespaces hold")
    processes: int = Field(32, ge=1, description="processes and threads")
    output_kb: int = Field(
        256, ge=1, description="what is kept of each of its outputs, in kB; the rest is read and dropped"
    )


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended."""

    #: `exit`, `signal`, or the limit that ended it: `cpu`, `wall`.
    ended: Literal["exit", "signal", "cpu", "wall"]
    #: Its exit code, the negative number of its signal, or None where `wall` ended it.
    exit_code: int | None
    stdout: str
    stderr: str
    cpu_s: float = 0.0
    max_rss_mb: float = 0.0
    #: What held: `namespaces`, `user`, `processes`, `files`, `network`, `signals`.
    held: tuple[str, ...] = ()


class Sandbox:
    """Runs Python programs, each in a process and a folder of its own, until it is closed. It holds nothing between two
    runs, and may be used by several threads.

    `readable` are further paths that programs may read. `trusted` runs them also where Linux cannot confine them, under
    whatever of it holds. `namespaces` False does without them, as on machines that forbid them.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        readable: Sequence[str | Path] = (),
        trusted: bool = False,
        namespaces: bool = True,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._readable = [str(path) for path in readable]
        self._trusted = trusted
        self._namespaces = namespaces
        self._lock = threading.Lock()
        #: The process groups of what runs, none of which has been waited for: their numbers are nobody else's.
        self._groups: set[int] = set()
        self._closed = False

    def close(self) -> None:
        """Kills what runs, and lets nothing run any more: those calls of `run`, and later ones, raise
        `SandboxUnavailable`."""
        with self._lock:
            self._closed = True
            for group in self._groups:
                _kill(group)

    def run(self, program: str, *, stdin: str = "", files: Mapping[str, str] | None = None) -> SandboxResult:
        """Runs a Python program's text to its end, `files` beside it by their names.

        A program that fails, or is ended by a limit, is a result. Raises `SandboxUnavailable` where it was not run.
        """
        if sys.platform != "linux":
            raise SandboxUnavailable(f"programs are run by means of Linux, and this is {sys.platform}", again=False)
        self._check_open()
        folder = Path(tempfile.mkdtemp(prefix="headrace-sandbox-"))
        try:
            folder.chmod(0o711)  # so that the sandbox's user gets to the scratch folder below, and sees no other
            return self._run(folder, {**(files or {}), "program.py": program}, stdin)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folder: Path, files: dict[str, str], stdin: str) -> SandboxResult:
        scratch, spec = folder / "scratch", folder / "spec.json"
        scratch.mkdir()
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        report, report_to = os.pipe()
        try:
            spec.write_text(json.dumps(self._spec(folder, scratch, files, report_to)), encoding="utf-8")
            with subprocess.Popen(
                [sys.executable, "-I", "-S", str(CHILD), str(spec)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[report_to],
                env=_environment(scratch),
                start_new_session=True,
            ) as process:
                os.close(report_to)
                report_to = -1
                return self._watched(process, report)
        finally:
            os.close(report)
            if report_to >= 0:
                os.close(report_to)

    def _spec(self, folder: Path, scratch: Path, files: dict[str, str], report_to: int) -> dict[str, Any]:
        python = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parent)]
        return {
            "argv": [sys.executable, "-I", "program.py"],
            "env": _environment(scratch),
            "files": files,
            "limits": self.limits.model_dump(),
            "must_hold": [] if self._trusted else MUST_HOLD,
            "namespaces": self._namespaces,
            "parent": os.getpid(),
            "readable": [*python, *self._readable],
            "report_fd": report_to,
            "scratch": str(scratch),
            "stdin": str(folder / "stdin"),
        }

    def _watched(self, process: subprocess.Popen[bytes], report: int) -> SandboxResult:
        """Reads what it says until it ends or its time is over; then nothing of it is left."""
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = (process.stdout.fileno(), process.stderr.fileno(), report)
        said = {fd: bytearray() for fd in outputs}
        most = self.limits.output_kb << 10
        with self._lock:
            self._groups.add(process.pid)
            if self._closed:
                _kill(process.pid)
        try:
            late = not _read(said, report, time.monotonic() + self.limits.wall_s, most)
        finally:
            with self._lock:
                self._groups.remove(process.pid)
            # The group has all that the program started: it can neither leave it nor begin a session.
            _kill(process.pid)
        _read(said, None, time.monotonic() + END_S, most)
        process.wait()
        self._check_open()
        stdout, stderr, told = (bytes(said[fd]).decode(errors="replace") for fd in outputs)
        return _result([json.loads(line) for line in told.splitlines()], stdout, stderr, late, self.limits.cpu_s)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxUnavailable("the sandbox was closed, and what ran in it was ended")


def _environment(scratch: Path) -> dict[str, str]:
    """All of a program's environment: nothing of this process' own."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _read(said: dict[int, bytearray], until: int | None, deadline: float, most: int) -> bool:
    """Reads pipes, keeping the first bytes of each, to the end of one of them, or of all; False where the deadline came
    first."""
    with selectors.DefaultSelector() as waiting:
        for fd in said:
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map() and (until is None or until in waiting.get_map()):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in waiting.select(left):
                part = os.read(key.fd, PART)
                if not part:
                    waiting.unregister(key.fd)
                kept = said[key.fd]
                kept += part[: most - len(kept)]
    return True


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _result(told: list[dict[str, Any]], stdout: str, stderr: str, late: bool, cpu_limit_s: float) -> SandboxResult:
    for line in told:
        if "error" in line:
            raise SandboxUnavailable(f"the sandbox could not be set up: {line['error']}")
        if "lacking" in line:
            raise SandboxUnavailable(
                f"this machine cannot confine a program: {', '.join(line['lacking'])} cannot be held (it needs Linux "
                "5.13 or newer with Landlock and seccomp). To run programs all the same, say `trusted: true`",
                again=False,
            )
    if not told:
        if late:
            raise SandboxUnavailable("the sandbox did not start in time: the machine is too busy, or wall_s too small")
        raise SandboxUnavailable(f"the sandbox ended before its program began: {stderr.strip()[-300:] or 'no word'}")
    held = tuple(dict.fromkeys(name for line in told for name in line["held"]))
    last = told[-1]
    code = last.get("exit_code")
    if late or code is None:
        return SandboxResult(ended="wall", exit_code=None, stdout=stdout, stderr=stderr, held=held)
    # One that ignores the signal of the limit is killed a second later.
    over = code == -signal.SIGXCPU or (code == -signal.SIGKILL and last["cpu_s"] >= cpu_limit_s)
    ended: Literal["exit", "signal", "cpu"] = "cpu" if over else "signal" if code < 0 else "exit"
    return SandboxResult(
        ended=ended,
        exit_code=code,
        stdout=stdout,
        stderr=stderr,
        cpu_s=last["cpu_s"],
        max_rss_mb=last["max_rss_mb"],
        held=held,
    )
