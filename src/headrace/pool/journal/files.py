"""The journal's files: their names, which of them a recovery reads, and what is asked of the file system.

The last is in one class, so that tests can break each of its calls."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.data.frame import Buffer

LOCK = "lock"
MARK = "mark"
RESERVE = "reserve"

#: Buffers that one `writev` takes (IOV_MAX is at least this on Linux and macOS).
BUFFERS_A_WRITE = 512
#: What a journal holds is nobody's but its user's.
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class Layout:
    """The newest snapshot and the segments from it on. `missing` numbers should be there and are not."""

    snapshot: Path | None
    segments: list[Path]
    missing: list[int]
    outdated: list[Path]


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.seg"


def snapshot_path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.snap"


def number_of(path: Path) -> int:
    return int(path.stem)


def read_layout(directory: Path) -> Layout:
    """Which files are there, and which should be."""
    snapshots = sorted(p for p in directory.glob("*.snap") if p.stem.isdigit())
    segments = sorted(p for p in directory.glob("*.seg") if p.stem.isdigit())
    snapshot = snapshots[-1] if snapshots else None
    first = number_of(snapshot) if snapshot else 1
    live = [path for path in segments if number_of(path) >= first]
    outdated = [*snapshots[:-1], *(path for path in segments if number_of(path) < first), *directory.glob("*.tmp")]
    numbers = {number_of(path) for path in live}
    # A snapshot comes after its segment, mark and reserve after the first: none of them exists without it.
    begun = snapshot is not None or any((directory / name).exists() for name in (MARK, RESERVE))
    expected = range(first, max(numbers) + 1 if numbers else first + begun)
    return Layout(snapshot, live, [n for n in expected if n not in numbers], outdated)


class Files:
    """What the journal asks of a file system."""

    def make_directory(self, path: Path) -> None:
        """Makes the directory and those above it, each of them durable in the one that holds it."""
        if not path.is_dir():
            parent = path.absolute().parent
            self.make_directory(parent)
            self.mkdir(path)
            self.sync_dir(parent)

    def mkdir(self, path: Path) -> None:
        path.mkdir(PRIVATE_FOLDER, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file to append to; `FileExistsError` where there is one."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, PRIVATE)

    def append_to(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def open_to_update(self, path: Path) -> int:
        """A small file that is overwritten in place; made where there is none."""
        return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, PRIVATE)

    def update(self, fd: int, data: bytes) -> None:
        """Overwrites such a file's beginning."""
        os.pwrite(fd, data, 0)

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        """Writes all of the buffers, in order."""
        left = [memoryview(part).cast("B") for part in buffers if len(part)]
        at = 0
        while at < len(left):
            done = os.writev(fd, left[at : at + BUFFERS_A_WRITE])
            while done:
                part = left[at]
                if done < len(part):
                    left[at] = part[done:]
                    break
                done -= len(part)
                at += 1

    def sync(self, fd: int) -> None:
        """Returns once what was written is on the disk."""
        os.fdatasync(fd)

    def sync_dir(self, directory: Path) -> None:
        """Makes what was created, renamed and deleted in the directory durable."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, directory: Path) -> int:
        """Locks the directory until `unlock`, or the process's end; `BlockingIOError` where another has it. The file
        `LOCK` in it only says who: whoever deletes that frees nothing."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(fd, str(os.getpid()))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        _sign(fd, "")
        # A forked child shares the lock: closing alone would leave it held for as long as the child lives.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def reserve(self, path: Path, size: int) -> None:
        """Takes room on the disk that `unlink` gives back."""
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, PRIVATE)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)


def _sign(directory: int, text: str) -> None:
    """Writes down who has a directory's lock, where the disk has room for it."""
    with suppress(OSError):
        fd = os.open(LOCK, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, PRIVATE, dir_fd=directory)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
