"""Child processes of a command: started in order, watched together, and always ended.

Each is a command of Headrace, another module or any program, with a log file and a process group of its own, so that
Ctrl-C reaches the parent alone, which then ends its children in reverse order, each with whatever it has started and
left behind in its group; where the parent itself is killed, the kernel ends them (on Linux).
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.data.errors import HeadraceError

__all__ = [
    "INTERRUPTED",
    "Child",
    "ChildDied",
    "Processes",
    "begin_as_child",
    "children_of",
    "descendants_of",
    "end_with_parent",
    "ending_words",
]

#: Seconds that a process may take to say that it listens, or is ready. Ten are usual; a machine that is busy with other
#: things has needed dozens of times that.
READY_S = 900.0
#: Seconds that a process may take to end once it is told to.
END_S = 20.0
#: Seconds that what a process has started may take to end by itself once that has: Python's tracker of shared memory
#: frees it then, which takes milliseconds.
LEFT_BEHIND_S = 1.0
#: Lines of a log that are shown when its process has died.
TAIL = 12
POLL_S = 0.02
#: The exit code of a process that Ctrl-C ended, as shells have it: 128 and the signal's number.
INTERRUPTED = 128 + signal.SIGINT
#: What tells a command to end.
ENDING = (signal.SIGINT, signal.SIGTERM)


class ChildDied(HeadraceError):
    """A child process ended unexpectedly; `tail` has the last lines of its log."""

    code = "child_died"

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


class Child:
    """One process. Its output goes to its log, where the line is found that says that it is ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        folder: Path | None = None,
        held: Collection[int] = (),
    ) -> None:
        """Starts `command`; `env` is added to the environment, `folder` is where it runs (default: where we do), and
        `held` are descriptors that it keeps open until it ends. Raises `HeadraceError` where there is no such program.
        """
        self.name = name
        self.log = log
        self.cpu_s = 0.0
        self._from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as into:
            try:
                self.process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=into,
                    stderr=into,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                    cwd=folder,
                    pass_fds=tuple(held),
                    start_new_session=True,
                    preexec_fn=begin_as_child,
                )
            except OSError as error:
                raise HeadraceError(f"{name} cannot be started: {command[0]}: {error.strerror}") from error

    def said(self) -> str:
        """The output of this process so far."""
        with self.log.open("rb") as log:
            log.seek(self._from)
            return log.read().decode(errors="replace")

    def ready(self, words: str) -> str:
        """Waits for the line `WORDS ready on ADDRESS`, or `at PROGRESS`; returns the last part. Raises `ChildDied`, or
        `HeadraceError` after `READY_S`."""
        return self._told(words, "ready")

    def listening(self, words: str) -> str:
        """Waits for the line `WORDS listening on ADDRESS`; returns the address, which may not be served yet. Raises as
        `ready`."""
        return self._told(words, "listening")

    def _told(self, words: str, state: str) -> str:
        give_up = time.monotonic() + READY_S
        while time.monotonic() < give_up:
            if found := re.search(rf"^{words} {state} (?:on|at) (.+)$", self.said(), re.MULTILINE):
                return found[1]
            self.check()
            time.sleep(POLL_S)
        raise HeadraceError(f"{self.name} was not {state} within {READY_S:g} s; its log is {self.log}")

    def code(self) -> int | None:
        """The exit code, or the negative signal number; None while it runs."""
        before = _cpu_of_children()
        code = self.process.poll()
        self.cpu_s += _cpu_of_children() - before  # a child's time counts from when its end is noticed
        return code

    def check(self) -> None:
        """Raises `ChildDied`, with the end of its log, where it has ended."""
        code = self.code()
        if code is None:
            return
        raise ChildDied(f"{self.name} {ending_words(code)}", "\n".join(self.said().splitlines()[-TAIL:]))

    def end(self) -> None:
        """Sends SIGTERM, and SIGKILL after `END_S`; `cpu_s` then has its CPU time. Whatever else is in its group is
        killed, also where it had ended before."""
        if self.code() is None:
            before = _cpu_of_children()
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.cpu_s += _cpu_of_children() - before
        self._end_left_behind()

    def kill(self) -> None:
        """Sends SIGKILL to it and to its group, where it has not ended; `end` must follow."""
        if self.process.returncode is None:
            _signal_group(self.process.pid, signal.SIGKILL)

    def _end_left_behind(self) -> None:
        """Kills what is left of its group `LEFT_BEHIND_S` after it has ended. Its number stays the group's for as long
        as there is anyone in it; where a process has the number, it is another's by now, and this group is empty."""
        give_up = time.monotonic() + LEFT_BEHIND_S
        if _is_there(self.process.pid):
            return
        while _signal_group(self.process.pid, 0):
            if time.monotonic() > give_up:
                _signal_group(self.process.pid, signal.SIGKILL)
                return
            time.sleep(POLL_S)


class Processes:
    """The children of a command. As a context manager it ends them all at exit, the last one first."""

    def __init__(self, logs: Path, *, held: Collection[int] = ()) -> None:
        """`logs` is the folder of their logs; `held` are descriptors that every child keeps open until it ends."""
        self._logs = logs
        self._held = held
        self.children: list[Child] = []
        #: Seconds of CPU by name, of those that have ended.
        self.cpu_s: dict[str, float] = {}

    def start(self, name: str, *args: Any, env: dict[str, str] | None = None) -> Child:
        """Starts `python -m ARGS`, which logs to `NAME.log`; `env` is added to the environment."""
        return self.start_program(name, [sys.executable, "-m", *map(str, args)], env=env)

    def start_program(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Child:
        """Starts any program, in `folder` where one is given; it logs to `NAME.log`. Raises `HeadraceError` where there
        is no such program."""
        with _signals_held():
            child = Child(name, command, self._logs / f"{name}.log", env, folder=folder, held=self._held)
            self.children.append(child)
        return child

    def check(self) -> None:
        """Raises `ChildDied` where one of them has ended."""
        for child in self.children:
            child.check()

    def end(self, child: Child) -> None:
        """Ends one of them, and adds its CPU time to `cpu_s`."""
        child.end()
        self.children.remove(child)
        self.cpu_s[child.name] = self.cpu_s.get(child.name, 0.0) + child.cpu_s

    def end_all(self) -> None:
        """Ends all of them, the last one first."""
        while self.children:
            self.end(self.children[-1])

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self.children:
            try:
                self.end(self.children[-1])
            except KeyboardInterrupt:  # a second Ctrl-C: the others are not waited for
                for child in self.children:
                    child.kill()


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_there(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _signal_group(pid: int, number: int) -> bool:
    """Sends a signal to a process group, 0 to look whether it is there; returns whether anyone got it."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delays SIGINT and SIGTERM until after the block, so that a child which it forks is always in the list of those to
    end. What this thread has blocked another of ours may be given, and Python then calls the handler here, between
    any two steps: one that raises in what Python runs around a fork would be heard by nobody."""
    held: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: held.append(number)) for number in _raising()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for missed in held:
            signal.raise_signal(missed)


def _raising() -> list[signal.Signals]:
    """Those signals of `ENDING` whose handlers may raise in this thread: Python calls them in the main thread alone,
    and those of an event loop, which hears of signals by a descriptor, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return []
    loops = signal.set_wakeup_fd(-1)
    if loops >= 0:
        signal.set_wakeup_fd(loops)
        return []
    return [number for number in ENDING if callable(signal.getsignal(number))]


def begin_as_child() -> None:
    """Runs in the child before its program: has it end with its parent, and unblocks the delayed signals."""
    end_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_with_parent(how: signal.Signals) -> None:
    """Has the kernel send this process a signal when its parent ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, how)  # PR_SET_PDEATHSIG


def ending_words(code: int) -> str:
    """How a process ended, by its exit code, or the negative number of its signal."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def children_of(pid: int) -> list[int]:
    """The processes that another started; none where it is gone, or the system does not tell."""
    try:
        listed = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(child) for line in listed for child in line.split()]


def descendants_of(pid: int) -> list[int]:
    """The processes that another started, and those that they started, and so on."""
    found = children_of(pid)
    for child in found:
        found += children_of(child)  # the list that is gone through grows
    return found
