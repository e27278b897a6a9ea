"""Posts that are not acknowledged yet: in memory while they are on their way, on disk where that lasts.

A file holds a post's JSON as it will be sent and is named by its place, its number of groups and its key. It is there
whole or not at all, and it is gone once the post was acknowledged: what lies in the folder is what is owed, and the
next process sends it. The bytes are handed to the operating system and not synced: they outlive a killed process, and
not always a machine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.data.errors import InvalidInput

log = logging.getLogger("headrace.envs")

#: Bytes of posts that are kept in memory alone.
IN_MEMORY = 64 << 20

_NAME = re.compile(r"(\d{12})-(\d+)-([0-9a-f]+)\.json")


@dataclass(slots=True)
class Post:
    """One post. `body` is in memory until it is on disk."""

    place: int
    groups: int
    key: str
    size: int
    body: bytes | None = None

    @property
    def name(self) -> str:
        return f"{self.place:012}-{self.groups}-{self.key}.json"


class Spool:
    """The folder. Without one, a temporary one that lasts only if something is left in it."""

    def __init__(self, folder: Path | None) -> None:
        self._temporary = folder is None
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="headrace-spool-")) if folder is None else folder
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(f"spool_dir {folder or tempfile.gettempdir()} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InvalidInput(f"spool_dir {self.folder} is in use: give each environment its own") from error
        self._next = self._kept = 0
        self._complained = False

    def left(self) -> Iterator[Post]:
        """What an earlier process owes, in its order. What it did not write to the end was never accepted."""
        for path in sorted(self.folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is not None:
                post = Post(int(found[1]), int(found[2]), found[3], path.stat().st_size)
                self._next = max(self._next, post.place + 1)
                yield post
            elif path.suffix == ".part":
                path.unlink(missing_ok=True)

    @property
    def crowded(self) -> bool:
        """Whether as much is in memory as may be."""
        return self._kept >= IN_MEMORY

    def add(self, body: bytes, groups: int, key: str) -> Post:
        post = Post(self._next, groups, key, len(body), body)
        self._next += 1
        self._kept += post.size
        return post

    def write(self, post: Post) -> None:
        """Makes a post outlive the process. One that cannot be written stays in memory: it can still be sent."""
        if post.body is None:
            return
        part = self.folder / f"{post.name}.part"
        try:
            part.write_bytes(post.body)
            part.rename(self.folder / post.name)
        except OSError as error:
            if not self._complained:
                log.warning("groups wait in memory only, as %s cannot be written: %s", self.folder, error)
            self._complained = True
            _remove(part)
        else:
            self._forget(post)

    def read(self, post: Post) -> bytes:
        return post.body if post.body is not None else (self.folder / post.name).read_bytes()

    def done(self, post: Post) -> None:
        """The post was acknowledged. A file that stays is sent again by the next process, under the same key."""
        if post.body is None:
            _remove(self.folder / post.name)
        self._forget(post)

    def set_aside(self, post: Post) -> Path:
        """Moves a post that the API will never take out of the way, to be looked at."""
        kept = self.folder / "refused" / post.name
        try:
            kept.parent.mkdir(exist_ok=True)
            if post.body is None:
                (self.folder / post.name).rename(kept)
            else:
                kept.write_bytes(post.body)
        except OSError as error:
            log.warning("%s cannot be written: %s", kept, error)
        self._forget(post)
        return kept

    def _forget(self, post: Post) -> None:
        if post.body is not None:
            self._kept -= post.size
            post.body = None

    def close(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        if self._temporary and {path.name for path in self.folder.iterdir()} <= {"lock"}:
            _remove(self.folder / "lock")
            self.folder.rmdir()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
