"""A snapshot while it is written: nobody reads it before it is whole and on the disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headrace.data.frame import Buffer, FrameKind
from headrace.data.frame import encode as encode_frame
from headrace.pool.journal import records
from headrace.pool.journal.files import Files
from headrace.pool.journal.layout import snapshot_path


class Draft:
    """`add` its records, then `finish` puts it in place, at once and for good; `abandon` leaves no trace."""

    def __init__(self, files: Files, directory: Path, number: int, first_serial: int) -> None:
        self.path = snapshot_path(directory, number)
        self._files = files
        self._draft = self.path.with_suffix(".tmp")
        self._records = 0
        files.unlink(self._draft)
        self._fd = files.create(self._draft)
        try:
            files.write(self._fd, records.encode_head(records.SegmentHead(number, first_serial, time.time())))
        except BaseException:
            self.abandon()
            raise

    def add(self, header: bytes, body: Sequence[Buffer]) -> None:
        self._files.write(self._fd, encode_frame(FrameKind.COMMIT, header, body))
        self._records += 1

    def finish(self) -> Path:
        self._files.write(self._fd, records.encode_snapshot_end(self._records))
        self._files.sync(self._fd)
        self._close()
        self._files.rename(self._draft, self.path)
        self._files.sync_dir(self.path.parent)
        return self.path

    def abandon(self) -> None:
        self._close()
        self._files.unlink(self._draft)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
