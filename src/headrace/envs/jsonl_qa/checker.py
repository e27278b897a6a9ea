"""`Checker`: answers are checked in processes of their own, so that none can hold up or end the environment."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path

from headrace.data.errors import HeadraceError
from headrace.extras import install_command

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
        """Whether an answer is right. One that takes more than its seconds of processor time to check is not."""
        async with self._places:
            process = self._idle.pop() if self._idle else self._start()
            line = ""
            try:
                line = await asyncio.to_thread(_ask, process, json.dumps({"said": said, "gold": gold}))
            finally:
                if line:
                    self._idle.append(process)
                else:
                    _end(process)
        if not line:
            log.info("an answer took too long to check, and counts as wrong")
        return line == "true\n"

    def close(self) -> None:
        """Ends the processes that are idle."""
        while self._idle:
            _end(self._idle.pop())

    def _start(self) -> subprocess.Popen[str]:
        # -P: the script's folder is no place to import from.
        command = [sys.executable, "-P", str(SCRIPT), str(self._seconds)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")


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
