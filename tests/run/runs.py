"""A run of a project as a process, and what it left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from headrace.pool.readonly import JournalView

#: Seconds that a whole run may take, on a machine that is busy with other things.
RUN_S = 1500


@contextmanager
def started(project: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """`headrace run` in a project, with its run in RUN; ended with Ctrl-C where the test ends first."""
    with headrace("run", str(project / "run.yaml"), "--run-dir", str(project / "RUN"), *args) as process:
        yield process


def activated(**env: str) -> dict[str, str]:
    """The environment of a command. `python3` is the one that runs this, as where its environment is activated: what
    else has the name may be a script that looks for one, which takes longer."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, **env}


@contextmanager
def headrace(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A command of Headrace; ended with Ctrl-C where the test ends first."""
    command = [sys.executable, "-m", "headrace", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=activated())
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate()


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON of its last line, once it has ended well."""
    out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == 0, (out, err)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def metrics(project: Path) -> list[dict[str, Any]]:
    """The trainer's rows that are written to their end."""
    path = project / "RUN" / "trainer" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def until_step(process: subprocess.Popen[str], project: Path, step: int) -> None:
    """Waits until the trainer has made so many steps."""
    while len(metrics(project)) < step:
        assert process.poll() is None, process.communicate()
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            pass


def mean(rows: list[dict[str, Any]]) -> float:
    return sum(row["reward"] for row in rows) / len(rows)


def ledger(project: Path, channel: str) -> dict[str, Any]:
    """What became of a channel's steps; it balances."""
    with JournalView(project / "RUN" / "journal") as view:
        stats = view.stats(channel)
    assert stats["balanced"]
    found: dict[str, Any] = stats["ledger"]
    return found


def processes_of(project: Path) -> list[psutil.Process]:
    """What still runs of a run: processes whose command line names its folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(project) in word for word in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
