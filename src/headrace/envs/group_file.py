"""Groups as JSON lines, for people and for later: whole lines only, however its writer ends."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from headrace.data.json import to_json
from headrace.files import append

log = logging.getLogger("headrace.envs")


class GroupFile:
    """A new file: where the path is taken, `_1`, `_2`, ... is put behind its stem."""

    def __init__(self, path: str | Path) -> None:
        wanted = Path(path)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._fd = _create(wanted)
        if self.path != wanted:
            log.info("%s is there already: groups go to %s", wanted, self.path)

    def write(self, group: Any) -> None:
        """Appends a line. A disk that is full costs the line, which is taken back, and raises."""
        append(self._fd, to_json(group) + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _create(wanted: Path) -> tuple[Path, int]:
    path, number = wanted, 0
    while True:
        try:
            return path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1
            path = wanted.with_stem(f"{wanted.stem}_{number}")
