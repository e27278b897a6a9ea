"""Room on the disk that a journal keeps for acknowledgements, as a file of its own.

A disk that is full takes no steps, but acknowledgements must still be written: they are what frees room. The file is
deleted when they need its room, and made again once there is enough. Meanwhile steps are refused.
"""

from __future__ import annotations

from pathlib import Path

from headrace.pool.journal.files import RESERVE, Files

#: What is kept: thousands of acknowledgements, and nothing against any disk.
RESERVE_BYTES = 1 << 20
#: While the reserve is being used, a compaction is called for once so much of it was.
ALARM_BYTES = RESERVE_BYTES // 10
#: As much as a segment that was begun in the reserve may have taken of it, on file systems with large blocks too.
NEW_SEGMENT_BYTES = 64 << 10


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
        self.alarm, self._used = False, 0
