"""The storm's log: what was done to the system and what it answered, as JSON lines.

Every process of the storm writes a file of its own into one folder. A line is handed to the system before its event has
any effect, so a process that is killed has logged all that it did, and lines of several processes are put in order by
the machine's monotonic clock, which they share.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import orjson

from headrace.data.json import to_json

#: An event as it is read back: `t` (nanoseconds of the monotonic clock), `who` wrote it, `e` is its kind.
Event = dict[str, Any]

SUFFIX = ".events.jsonl"


class EventLog:
    """Appends events to one file. Each is in the system's hands when `write` returns, and with `durable` on the disk:
    what a restarted process goes by must outlive the machine too."""

    def __init__(self, folder: Path, who: str) -> None:
        self.path = folder / f"{who}{SUFFIX}"
        self._who = who
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # the process before was killed within a line: that event did not happen

    def write(self, event: str, *, durable: bool = False, **fields: Any) -> None:
        """Logs one event with its fields."""
        record = {"t": time.monotonic_ns(), "who": self._who, "e": event, **fields}
        os.write(self._fd, to_json(record) + b"\n")
        if durable:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_log(path: Path) -> list[Event]:
    """The events of one file, as they were written. Lines that are not whole are left out."""
    found: list[Event] = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return found


def read_logs(folder: Path) -> list[Event]:
    """The events of all files in a folder, in the order in which they happened."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    return sorted((event for path in files for event in read_log(path)), key=lambda event: int(event["t"]))
