"""What is made once and found again: for a user, by every later run and clone; for a run, by all of its workers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Alone among the processes of this machine, or beside those alone that share the lock too; the system lifts the
    lock of one that dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` has filled, once for all workers of this run, whichever comes first; the others wait. Where
    `make` raises, the next one begins anew. Tests may read what is in it and change nothing."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # a worker's own folder lies in the run's
    found = base / f"once-{name}"
    with locked(base / f"{name}.lock"):
        if not found.exists():
            begun = factory.mktemp(name)
            make(begun)
            begun.rename(found)
    return found
