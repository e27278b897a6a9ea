"""Files that an environment writes: groups as JSON lines, an HTML page of them, and its checkpoints.

All of them hold whole records or are whole, however the process ends.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import InvalidInput
from headrace.data.json import to_json
from headrace.envs.server.sequences import MASKED
from headrace.files import append, write_whole

log = logging.getLogger("headrace.envs")

_CHECKPOINT_NAME = re.compile(r"step-(\d+)\.json")


class GroupFile:
    """Writes groups as JSON lines to a new file; where the path exists, `_1`, `_2`, ... is put behind its stem."""

    def __init__(self, path: str | Path) -> None:
        wanted = Path(path)
        wanted.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._fd = _create(wanted)
        if self.path != wanted:
            log.info("%s is there already: groups go to %s", wanted, self.path)

    def write(self, group: Any) -> None:
        """Appends a line. Where that fails, as on a full disk, the partial line is removed and the error raised."""
        append(self._fd, to_json(group) + b"\n")

    def close(self) -> None:
        """Closes the file; more than once does no harm."""
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


#: Bytes of groups on the page: a browser is slow with more. The rest stays in the JSON lines.
MAX_PAGE_BYTES = 64_000_000


def write_page(lines: Path, page: Path | None = None, *, title: str | None = None) -> Path:
    """Writes the HTML page of the groups in a JSON lines file, by default beside it; its path.

    It needs no other file or network, and leaves out groups beyond `MAX_PAGE_BYTES`, and lines that are no groups.
    """
    page = page or lines.with_suffix(".html")
    groups, size, unread, left = [], 0, 0, 0
    for group in _groups(lines):
        if group is None:
            unread += 1
            continue
        encoded = to_json(group)
        size += len(encoded)
        if size > MAX_PAGE_BYTES:
            left += 1
            continue
        groups.append(encoded)
    about = {"title": title or lines.stem, "source": lines.name, "unread": unread, "left": left}
    data = b'{"about":' + to_json(about) + b',"groups":[' + b",".join(groups) + b"]}"
    # Inside a script element only its end could be misread.
    text = data.decode().replace("<", "\\u003c")
    template = resources.files("headrace.envs").joinpath("groups_page.html").read_text(encoding="utf-8")
    write_whole(page, template.replace("%DATA%", text).encode())
    return page


def _groups(lines: Path) -> Iterator[dict[str, Any] | None]:
    """What the page shows of each line; None for a line that is no group."""
    with lines.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                yield _group(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError):
                yield None


def _group(group: dict[str, Any]) -> dict[str, Any]:
    messages = group.get("messages") or [None] * len(group["tokens"])
    return {
        "rollouts": [
            {
                "score": group["scores"][at],
                "tokens": len(tokens),
                "trained": sum(label != MASKED for label in group["masks"][at]),
                "messages": messages[at],
            }
            for at, tokens in enumerate(group["tokens"])
        ]
    }


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
