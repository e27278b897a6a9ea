"""How far a journal had come: the last commits that were acknowledged, noted in a small file beside the segments.

A segment's end says nothing of what stood behind it. The mark does: what it names and what does not read back is
damage, and no torn tail. It never names more than was acknowledged, so one that is old, missing or unreadable only
tells less: writing it needs no sync of its own, and a failure to write it is no failure of a commit.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from crc32c import crc32c

from headrace.pool.journal.files import MARK, Files

#: Where Linux tells one start of the machine from another.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Magic, the last commit that the kernel has, the last that the disk has, the machine's start; then their CRC32C. It is
#: smaller than a sector, so that a disk has all of it or nothing.
_FIELDS = struct.Struct("<8sQQ16s")
_SUM = struct.Struct("<I")
_MAGIC = b"HRMARK\x01\0"


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
