"""Metrics as JSON lines, in a file that others read while it is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headrace.data.json import to_json
from headrace.files import append
from headrace.metrics.row import Row


class Lines:
    """Appends a line a row. What is in the file are whole lines: one that could not be written to its end is taken
    back, and what a killed writer left of a line is cut off when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._cut()

    def write(self, row: Row) -> None:
        append(self._fd, _encoded(row) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self) -> None:
        end = os.fstat(self._fd).st_size
        while end and os.pread(self._fd, 1, end - 1) != b"\n":
            end -= 1
        os.ftruncate(self._fd, end)


def _encoded(row: Row) -> bytes:
    try:
        return to_json(row)
    except (TypeError, ValueError):
        return to_json({str(name): _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """A value that JSON has a form for: foreign tables by their columns and data, what has none as text."""
    if hasattr(value, "columns") and hasattr(value, "data"):
        return {"columns": list(value.columns), "data": [list(row) for row in value.data]}
    try:
        to_json(value)
    except (TypeError, ValueError):
        return str(value)
    return value
