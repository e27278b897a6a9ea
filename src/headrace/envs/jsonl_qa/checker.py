"""`Checker`: answers are checked in processes of their own, so that none can hold up or end the environment."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

from headrace.data.errors import HeadraceError
from headrace.extras import install_command
from headrace.processes import ending_words

log = logging.getLogger("headrace.envs")

SCRIPT = Path(__file__).with_name("compare.py")


class Checker:
    """So many processes at most, each begun when it is needed. A check that is given up takes its process with it."""

    def __init__(self, processes: int, seconds: int) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise HeadraceError(f"answers are checked by math-verify: {install_command('envs')}")
        self._seconds = seconds
        self._places = asyncio.Semaphore(processes)
        self._idle: list[subprocess.Popen[str]] = []

    async def is_right(self, said: str, gold: str) -> bool:
        """Whether an answer is right. One that takes more than its seconds of processor time to check is not. A check
        whose process something else ended is made once more, in a new one."""
        asked = json.dumps({"said": said, "gold": gold})
        async with self._places:
            process = self._ready()
            line = await self._answer(process, asked)
            if not line and process.returncode != -signal.SIGXCPU:
                process = self._start()
                line = await self._answer(process, asked)
        if not line and process.returncode == -signal.SIGXCPU:
            log.info("an answer took too long to check, and counts as wrong")
        elif not line:
            how = ending_words(process.returncode)
            log.warning("an answer counts as wrong: two processes ended while they checked it; the second %s", how)
        return line == "true\n"

    def close(self) -> None:
        """Ends the processes that are idle."""
        while self._idle:
            _end(self._idle.pop())

    async def _answer(self, process: subprocess.Popen[str], asked: str) -> str:
        """A process's answer; nothing where it ended, and its `returncode` is then known."""
        line = ""
        try:
            line = await asyncio.to_thread(_ask, process, asked)
        finally:
            if line:
                self._idle.append(process)
            else:
                _end(process)
        return line

    def _ready(self) -> subprocess.Popen[str]:
        """An idle process, or a new one; those that have ended meanwhile are forgotten."""
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
            _end(process)
        return self._start()

    def _start(self) -> subprocess.Popen[str]:
        # -P: the script's folder is no place to import from.
        command = [sys.executable, "-P", str(SCRIPT), str(self._seconds)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is the parent's to act on; where that is gone, its end of stdin is too
        )


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The process's answer; nothing where it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline()
    except (BrokenPipeError, ValueError):  # a pipe that `_end` has closed meanwhile
        return ""


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError), process:  # what was not read when it ended
        process.kill()
