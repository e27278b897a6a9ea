"""What the agents have done so far: a small file in the run's folder, so that a resumed run goes on counting."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

__all__ = ["Counters", "read", "write"]

FILE = "agents.json"


class Counters(msgspec.Struct):
    """`reserved` groups may have been begun, by this run of the agents or one before it: a uid is never used twice."""

    reserved: int = 0
    calls: int = 0
    games: int = 0
    wins: int = 0
    given_up: int = 0
    retries: int = 0
    at: float = 0.0


def read(run: Path) -> Counters:
    """The counters of a run; none yet are zeros."""
    try:
        return msgspec.json.decode((run / FILE).read_bytes(), type=Counters)
    except FileNotFoundError:
        return Counters()


def write(run: Path, counters: Counters) -> None:
    """Replaces the file, so that a reader sees the old one or the new one."""
    counters.at = time.time()
    beside = run / f"{FILE}.new"
    beside.write_bytes(msgspec.json.encode(counters))
    os.replace(beside, run / FILE)
