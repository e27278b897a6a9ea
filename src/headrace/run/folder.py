"""A run's folder: its locks, and the file from which it is resumed.

One lock is the run's own: whoever has it runs. The other is an open file that the run's processes hold too, and is free
again when the last of them has ended: a run that was killed is not resumed while one of its processes still writes to
the journal.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.files import nearest, read_json, write_whole
from headrace.run.services import LOGS

LOCK_FILE, PROCESSES_LOCK_FILE, STATE_FILE = "run.lock", "processes.lock", "run.json"
#: Seconds that processes of a run that was killed may take to end: each is told to at once, and takes at most
#: `processes.END_S` to do so.
ORPHANS_S = 60.0
POLL_S = 0.1


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run goes by, as it was when it was last started."""

    #: The run's file, with what `--set` changed.
    config: dict[str, Any]
    seconds: float = 0.0
    #: The steps after which its trainer ended by itself; 0 while it has not.
    ended: int = 0

    def write(self, run: Path) -> None:
        """Writes the file into the run's folder, whole or not at all."""
        write_whole(run / STATE_FILE, orjson.dumps(msgspec.to_builtins(self), option=orjson.OPT_INDENT_2))

    @staticmethod
    def read(run: Path) -> RunState | None:
        """The state of a run; None where the folder holds none. Raises `InvalidInput` where it cannot be read."""
        try:
            return read_json(run / STATE_FILE, RunState)
        except FileNotFoundError:
            return None


#: Parts of a run's file that a resumed run must have as it began: what was recorded is of them.
FIXED = ("model", "data", "agent")
#: What else it must have where rows are played: the rollouter takes so many groups a version for used, those of the
#: versions before the resume too. With fewer now it would stop before the trainer has all, with more run ahead of it.
FIXED_WITH_DATA = ("train.batch_size",)


def begin(run: Path, config: dict[str, Any]) -> RunState:
    """A new run in an empty folder. Raises `InvalidInput` where there is something in it."""
    if run.exists() and any(run.iterdir()):
        held = " It holds a run: go on with --resume, or name another folder." if RunState.read(run) else ""
        raise InvalidInput(f"{run} is not empty.{held or ' Name another folder with --run-dir.'}")
    (run / LOGS).mkdir(parents=True, exist_ok=True)
    state = RunState(config=config)
    state.write(run)
    return state


def resume(run: Path, config: dict[str, Any]) -> RunState:
    """The run in a folder, with the file as it is now. Raises `InvalidInput` where there is none, or where the file has
    changed in what a run cannot change."""
    kept = RunState.read(run)
    if kept is None:
        raise InvalidInput(f"--resume: {run} holds no run; without --resume one would begin there")
    for name in (*FIXED, *(FIXED_WITH_DATA if config.get("data") is not None else ())):
        before, now = _at(kept.config, name), _at(config, name)
        if before != now:
            raise InvalidInput(
                f"--resume: {name} was {before} when {run} began, and is {now} now; put it back, or begin another run "
                "without --resume"
            )
    steps = config.get("train", {}).get("steps", 0)
    if kept.ended and steps <= kept.ended:
        raise InvalidInput(f"--resume: {run} has made its {kept.ended} steps; more: --set train.steps={2 * kept.ended}")
    return msgspec.structs.replace(kept, config=config, ended=0)


def _at(config: dict[str, Any], name: str) -> Any:
    """The value of a dotted name; None where there is none."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def latest(runs: Path, prefix: str) -> Path:
    """The latest run below a folder. Raises `InvalidInput` where there is none."""
    found = sorted(path for path in runs.glob(f"{prefix}-*") if (path / STATE_FILE).exists())
    if not found:
        there = nearest(prefix, [path.name for path in runs.glob("*")] if runs.exists() else [])
        raise InvalidInput(f"--resume: there is no run of {prefix} in {runs}{there}; name its folder with --run-dir")
    return found[-1]


@contextmanager
def locked(run: Path) -> Iterator[int]:
    """Holds the run's folder for this process and, by the descriptor that it yields, for its children. Raises
    `InvalidInput` where another run is there, and `HeadraceError` where processes of a killed one do not end."""
    with _opened(run / LOCK_FILE) as own, _opened(run / PROCESSES_LOCK_FILE) as shared:
        if not _lock(own):
            raise InvalidInput(
                f"{run} is in use by another `headrace run` (process {os.pread(own, 32, 0).decode()}); wait for it, or "
                "name another folder with --run-dir"
            )
        os.ftruncate(own, 0)
        os.pwrite(own, str(os.getpid()).encode(), 0)
        give_up = time.monotonic() + ORPHANS_S
        while not _lock(shared):
            if time.monotonic() > give_up:
                raise HeadraceError(f"{run}: processes of the run before, which was killed, have not ended yet")
            time.sleep(POLL_S)
        yield shared


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
