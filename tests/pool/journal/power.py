"""A disk that forgets what was not synced.

`Disk` works on real files, and keeps beside them what a power failure would leave: a file's content as it was when it
was last synced, a directory's entries as they were when it was last synced. `after_a_power_failure` writes that out,
with any part of what was not synced mixed in, as real disks do: pages reach them in any order, a file can be longer
than what was written of it, and of two unsynced renames either may have happened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.data.frame import Buffer
from headrace.pool.journal.files import Files

#: Bytes that reach the disk together. Small, so that even small frames can be torn.
PAGE = 64


class PowerFailure(BaseException):
    """The machine stops: nobody handles this."""


@dataclass
class _File:
    """A file, whatever it is called."""

    now: Path | None  # where its content can be read
    durable: bytes = b""


class Disk(Files):
    def __init__(self, root: Path, fail_at: int | None = None) -> None:
        self.root = root
        self.fail_at = fail_at
        self.operations = 0
        self._fds: dict[int, _File | None] = {}
        self._entries: dict[Path, _File | None] = {}  # None: a directory
        self._durable: dict[Path, _File | None] = {}

    # -- the calls of a journal ----------------------------------------------------------------------------------------

    def _work(self) -> None:
        self.operations += 1
        if self.fail_at is not None and self.operations >= self.fail_at:
            raise PowerFailure

    def mkdir(self, path: Path) -> None:
        self._work()
        super().mkdir(path)
        self._entries[path] = None

    def create(self, path: Path) -> int:
        self._work()
        fd = super().create(path)
        self._fds[fd] = self._entries[path] = _File(path)
        return fd

    def append_to(self, path: Path) -> int:
        self._work()
        fd = super().append_to(path)
        self._fds[fd] = self._entries[path]
        return fd

    def open_to_update(self, path: Path) -> int:
        self._work()
        fd = super().open_to_update(path)
        self._fds[fd] = self._entries.setdefault(path, _File(path))
        return fd

    def update(self, fd: int, data: bytes) -> None:
        self._work()
        super().update(fd, data)

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        self._work()
        super().write(fd, buffers)

    def sync(self, fd: int) -> None:
        self._work()
        file = self._fds[fd]
        assert file is not None
        assert file.now is not None
        file.durable = file.now.read_bytes()

    def sync_dir(self, directory: Path) -> None:
        self._work()
        for path in [path for path in self._durable if path.parent == directory]:
            del self._durable[path]
        self._durable.update((path, file) for path, file in self._entries.items() if path.parent == directory)

    def truncate(self, fd: int, size: int) -> None:
        self._work()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._work()
        super().rename(old, new)
        file = self._entries[new] = self._entries.pop(old)
        assert file is not None
        file.now = new

    def link(self, old: Path, new: Path) -> None:
        self._work()
        super().link(old, new)
        self._entries[new] = self._entries[old]

    def unlink(self, path: Path) -> None:
        self._work()
        super().unlink(path)
        file = self._entries.pop(path, None)
        if file is not None and file.now == path:
            file.now = next((other for other, entry in self._entries.items() if entry is file), None)

    def close(self, fd: int) -> None:
        del self._fds[fd]
        super().close(fd)

    def lock(self, directory: Path) -> int:
        self._work()
        fd = super().lock(directory)
        self._fds[fd] = None
        return fd

    def unlock(self, fd: int) -> None:
        del self._fds[fd]
        super().unlock(fd)

    # -- what can happen to it -----------------------------------------------------------------------------------------

    def kill(self) -> None:
        """The process ends; the machine goes on."""
        while self._fds:
            os.close(self._fds.popitem()[0])

    def after_a_power_failure(self, target: Path, luck: random.Random | None = None) -> None:
        """Writes to `target` what the disk may hold; without luck, nothing that was not synced."""
        entries = dict(self._durable)
        if luck is not None:
            for path in {*self._durable, *self._entries}:
                if luck.random() < 0.5:
                    entries.pop(path, None)
                    if path in self._entries:
                        entries[path] = self._entries[path]
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path, file in sorted(entries.items()):
            copy = target / path.relative_to(self.root)
            if not copy.parent.is_dir():
                continue  # the directory itself was lost
            if file is None:
                copy.mkdir()
            else:
                copy.write_bytes(_content(file, luck))


def _content(file: _File, luck: random.Random | None) -> bytes:
    if luck is None or file.now is None:
        return file.durable
    now = file.now.read_bytes()
    size = luck.choice([len(file.durable), len(now), luck.randint(0, max(len(now), len(file.durable)))])
    size = max(size, min(len(file.durable), len(now)))  # only a truncation that was asked for makes it shorter
    blank = luck.choice([bytes(PAGE), luck.randbytes(PAGE)])
    pages = []
    for at in range(0, size, PAGE):
        old, new = file.durable[at : at + PAGE], now[at : at + PAGE]
        page = old if old == new or luck.random() < 0.5 else new
        pages.append((page + blank[len(page) :])[: size - at])
    return b"".join(pages)
