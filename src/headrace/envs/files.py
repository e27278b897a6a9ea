"""Files that an environment writes: groups as JSON lines, an HTML page of them, and its checkpoints.

All of them hold whole records or are whole, however the process ends.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.json import to_json
from headrace.files import append, write_whole

log = logging.getLogger("headrace.envs")

_CHECKPOINT_NAME = re.compile(r"step-(\d+)\.json")


class GroupFile:
    """Writes groups as JSON lines to a new file; where the path exists, `_1`, `_2`, ... is put behind its stem.

    `written` says whether a group is in it. A file without one is removed when it is closed.
    """

    def __init__(self, path: str | Path) -> None:
        wanted = Path(path)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._fd = _create(wanted)
        self.written = False
        if self.path != wanted:
            log.info("%s is there already: groups go to %s", wanted, self.path)

    def write(self, group: Any) -> None:
        """Appends a line. Where that fails, as on a full disk, the partial line is removed and the error raised."""
        append(self._fd, to_json(group) + b"\n")
        self.written = True

    def close(self) -> None:
        """Closes the file; more than once does no harm."""
        if self._fd >= 0:
            if not self.written:
                self.path.unlink(missing_ok=True)
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


def write_page(
    lines: Path, page: Path | None = None, *, title: str | None = None, tokenizer: str | None = None
) -> Path:
    """Writes the HTML page of the groups in a JSON lines file, by default beside it; its path.

    It is the dashboard's export of that file, made by `headrace dashboard` in a process of its own: it needs no other
    file or network, and says what it leaves out. `tokenizer` is the model's folder, with which tokens have texts; one
    that is no folder is left out. Raises `HeadraceError` where no page is made.
    """
    page = page or lines.with_suffix(".html")
    command = [sys.executable, "-m", "headrace", "dashboard", str(lines), "--export", str(page)]
    if title is not None:
        command += ["--title", title]
    if tokenizer is not None and (Path(tokenizer) / "tokenizer.json").exists():
        command += ["--tokenizer-path", tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HeadraceError(f"{page} was not written: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return page


class EnvCheckpoints:
    """An environment's own state, as JSON in the trainer's checkpoint folder: `env_checkpoints/NAME/step-N.json`."""

    def __init__(self, checkpoint_dir: str, name: str) -> None:
        self.folder = Path(checkpoint_dir) / "env_checkpoints" / name

    def save(self, step: int, data: dict[str, Any]) -> Path:
        """Writes a checkpoint, whole or not at all; its path."""
        path = self.folder / f"step-{step}.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
        return path

    def load(self, step: int) -> dict[str, Any] | None:
        """The newest checkpoint up to this step; None where there is none. Raises `InvalidInput` for a damaged one."""
        matches = (_CHECKPOINT_NAME.fullmatch(path.name) for path in self.folder.glob("step-*.json"))
        newest = max((saved for match in matches if match and (saved := int(match[1])) <= step), default=None)
        if newest is None:
            return None
        path = self.folder / f"step-{newest}.json"
        try:
            data = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"{path} is no checkpoint: {error}; delete it to go on from the one before") from error
        if not isinstance(data, dict):
            raise InvalidInput(f"{path} must hold an object of attributes, not {type(data).__name__}")
        return data
