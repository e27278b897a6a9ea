"""The journal's files: their names, which of them a recovery reads, the two small ones beside the segments (the mark
and the reserve), and what is asked of the file system.

The last is in one class, so that tests can break each of its calls.

The mark says how far the journal had come: the last commits that were acknowledged. A segment's end says nothing of
what stood behind it; what the mark names and what does not read back is damage, and no torn tail. It never names more
than was acknowledged, so one that is old, missing or unreadable only tells less: writing it needs no sync of its own,
and a failure to write it is no failure of a commit.

The reserve is room on the disk for acknowledgements. A disk that is full takes no steps, but acknowledgements must
still be written: they are what frees room. The file is deleted when they need its room, and made again once there is
enough. Meanwhile steps are refused.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from crc32c import crc32c

from headrace.data.frame import Buffer

LOCK = "lock"
MARK = "mark"
RESERVE = "reserve"

#: Buffers that one `writev` takes (IOV_MAX is at least this on Linux and macOS).
BUFFERS_A_WRITE = 512
#: Permissions: only the user who runs the pool may read a journal.
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
#: Where Linux tells one start of the machine from another.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Magic, the last commit that the kernel has, the last that the disk has, the machine's start; then their CRC32C. It is
#: smaller than a sector, so that a disk has all of it or nothing.
_FIELDS = struct.Struct("<8sQQ16s")
_SUM = struct.Struct("<I")
_MAGIC = b"HRMARK\x01\0"
#: The size of the reserve: thousands of acknowledgements, and nothing against any disk.
RESERVE_BYTES = 1 << 20
#: While the reserve is being used, a compaction is called for once so much of it was.
ALARM_BYTES = RESERVE_BYTES // 10
#: As much as a segment that was begun in the reserve may have taken of it, on file systems with large blocks too.
NEW_SEGMENT_BYTES = 64 << 10


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
        `LOCK` in it only says who has it: deleting that file frees nothing."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sign(fd, str(os.getpid()))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        """Ends what `lock` began."""
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


# -- the mark ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Watermark:
    """The last commit handed to the kernel, and the last known to be on the disk; `boot` is the machine's start."""

    written: int = 0
    synced: int = 0
    boot: bytes = bytes(16)

    @property
    def acknowledged(self) -> int:
        """The last commit that must be there: what the kernel had is, unless the machine was started again since."""
        same = self.boot != bytes(16) and self.boot == boot_id()
        return max(self.synced, self.written) if same else self.synced


def boot_id() -> bytes:
    """Which start of the machine this is; zeros where nothing tells."""
    try:
        return UUID(BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def read_watermark(directory: Path) -> Watermark:
    """A journal's mark; one that names nothing where it is missing or does not read back."""
    try:
        data = (directory / MARK).read_bytes()
    except FileNotFoundError:
        return Watermark()
    if len(data) < _FIELDS.size + _SUM.size:
        return Watermark()
    magic, written, synced, boot = _FIELDS.unpack_from(data)
    sound = magic == _MAGIC and _SUM.unpack_from(data, _FIELDS.size)[0] == crc32c(data[: _FIELDS.size])
    return Watermark(written, synced, boot) if sound else Watermark()


class WatermarkFile:
    """The mark of an open journal. Where it cannot be opened or written, it stays behind, and nothing else happens."""

    def __init__(self, files: Files, directory: Path, *, synced: int = 0) -> None:
        self._files = files
        self._fd = -1
        before = read_watermark(directory)
        self._boot = boot_id()
        self._synced = max(before.synced, synced)
        with suppress(OSError):
            self._fd = files.open_to_update(directory / MARK)
        self.advance(before.written if before.boot == self._boot else 0)

    def advance(self, written: int, synced: int | None = None) -> None:
        """Notes the last commit that the kernel has, and, where that is news, the last that the disk has."""
        if self._fd < 0:
            return
        if synced is not None:
            self._synced = synced
        fields = _FIELDS.pack(_MAGIC, written, self._synced, self._boot)
        try:
            self._files.update(self._fd, fields + _SUM.pack(crc32c(fields)))
        except OSError:
            pass  # it stays behind: what it names is still true

    def sync(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                self._files.sync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)


# -- the reserve -------------------------------------------------------------------------------------------------------


class Reserve:
    """`spent`: it was given up, and has not been taken again. `alarm`: its room is running out; the journal should be
    compacted."""

    def __init__(self, files: Files, directory: Path) -> None:
        self.spent = False
        self.alarm = False
        self._files = files
        self._path = directory / RESERVE
        self._used = 0  # bytes written since it was given up, or since the last alarm

    def give_up(self) -> bool:
        """Makes its room usable; False where there is none."""
        if self.spent or not self._path.exists():
            return False
        self._files.unlink(self._path)
        self.spent = self.alarm = True
        self._used = 0
        return True

    def take(self, less: int = 0) -> None:
        """Takes the room; where there is not all of it, `less` bytes fewer."""
        for size in () if self._path.exists() else (RESERVE_BYTES, RESERVE_BYTES - less):
            try:
                self._files.reserve(self._path, size)
                break
            except OSError:
                self._files.unlink(self._path)
        self.spent = not self._path.exists()

    def written(self, size: int) -> None:
        """So many bytes were written to the journal."""
        if self.spent:
            self._used += size
            self.alarm |= self._used > ALARM_BYTES

    def clear_alarm(self) -> None:
        """The journal was compacted: what is written from here on counts anew."""
        self.alarm, self._used = False, 0
