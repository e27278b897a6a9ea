"""Checking, saving, mending and copying a journal. Whatever is stopped half-way leaves the journal as it was."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from headrace.data.errors import InvalidInput, shown
from headrace.data.frame import Buffer, Frame, FrameKind
from headrace.data.frame import encode as encode_frame
from headrace.pool.errors import JournalDamaged, JournalError, JournalLocked
from headrace.pool.facts import Fact, Lost, Tallied
from headrace.pool.journal import records
from headrace.pool.journal.files import (
    LOCK,
    Files,
    Layout,
    WatermarkFile,
    number_of,
    read_layout,
    read_watermark,
    segment_path,
)
from headrace.pool.journal.records import SnapshotWriter
from headrace.pool.journal.scan import Hole, Scan, scan

SAVED = "saved"
DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Saved:
    """What `save_around` kept: where, and how many commits."""

    path: Path
    commits: int


def holder(directory: Path) -> str:
    """Who has a journal open, as its lock file says."""
    lock = directory / LOCK
    pid = lock.read_text().strip() if lock.exists() else ""
    return f"process {pid}" if pid else "another process"


def verify(directory: Path) -> Scan:
    """Reads everything and changes nothing; damage and a torn tail are in the answer."""
    if not directory.is_dir():
        raise FileNotFoundError(f"no journal at {directory}: it is not a directory")
    return scan(directory, lambda _: None, tolerant=True)


class RepairReader:
    """Reads a damaged journal: what reads back goes on to `add`, header and body. Behind every hole comes what the next
    commits tell of it: the facts of the commit before it, and what the ledgers said."""

    def __init__(self, add: Callable[[bytes, Sequence[Buffer]], object]) -> None:
        self._add = add
        self._at = 0.0  # when what was read last happened
        self._settled: set[str] | None = None  # channels whose ledgers were told since the last hole; None: no hole yet
        self.commits = 0  # that read back

    def read(self, directory: Path) -> Scan:
        return scan(directory, self._take, tolerant=True, missed=self._miss)

    def _miss(self, hole: Hole, frame: Frame | None) -> None:
        self._settled = set()
        if frame is not None:
            outline = records.decode_outline(frame)
            self._at = outline.at
            if hole.lost and bytes(outline.repeated) != records.NO_FACTS:
                self._add(records.encode_repeated(bytes(outline.repeated)), [])
        lost: list[Fact] = [Lost("", self._at, str(damage)) for damage in hole.damage]
        self._add(records.encode_commit(lost, None)[0], [])

    def _take(self, frame: Frame) -> None:
        self.commits += 1
        if self._settled is not None:
            outline = records.decode_outline(frame)
            self._at = outline.at
            told: list[Fact] = [
                Tallied(name, self._at, *counts) for name, *counts in outline.tallies if name not in self._settled
            ]
            if told:
                self._settled.update(fact.channel for fact in told)
                self._add(records.encode_commit(told, None)[0], [])
        self._add(bytes(frame.header), [frame.body])


def save_around(directory: Path, files: Files | None = None) -> Saved:
    """Copies every commit that reads back into `saved/`, a sound journal of its own."""
    files = files or Files()
    target = directory / SAVED
    shutil.rmtree(target, ignore_errors=True)
    files.make_directory(target)
    serials = count(1)

    def keep(header: bytes, body: Sequence[Buffer]) -> None:
        files.write(fd, encode_frame(FrameKind.COMMIT, header, body, serial=next(serials)))

    reader = RepairReader(keep)
    try:
        fd = files.create(segment_path(target, 1))
        try:
            files.write(fd, records.encode_head(records.SegmentHead(1, 1, time.time())))
            reader.read(directory)
            files.sync(fd)
        finally:
            files.close(fd)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # half of it would only take room
        raise
    files.sync_dir(target)
    return Saved(target, reader.commits)


def repair(directory: Path, files: Files | None = None) -> Scan:
    """Puts what reads back in the journal's place; the damaged files are kept in `damaged/`. Returns what was wrong.

    The commits that read back become a snapshot of a higher number than all that is there, which takes effect when it
    is renamed, at once; only then do the files that it replaces go.
    """
    files = files or Files()
    try:
        lock = files.lock(directory)
    except BlockingIOError:
        who = holder(directory)
        raise JournalLocked(f"journal {directory} is open in {who}; close that pool first") from None
    try:
        found = verify(directory)
        if not found.damage:
            return found
        _set_aside(directory, found.layout, files)
        number = max((number_of(path) for path in _numbered(found)), default=0) + 1
        first = max(found.next_serial, found.acknowledged + 1)  # what is lost keeps its numbers
        draft = SnapshotWriter(files, directory, number, first)
        try:
            RepairReader(draft.add).read(directory)
            _begin_segment(files, directory, number, first)
            draft.finish()
        except BaseException:
            draft.abandon()
            raise
        for path in read_layout(directory).outdated:
            files.unlink(path)
        shutil.rmtree(directory / SAVED, ignore_errors=True)
        return found
    finally:
        files.unlock(lock)


def _numbered(found: Scan) -> list[Path]:
    """Every file whose number is taken: those that are there, and those that should be."""
    layout = found.layout
    there = [path for path in (layout.snapshot, *layout.segments, *layout.outdated) if path is not None]
    return [path for path in (*there, *(damage.path for damage in found.damage)) if path.stem.isdigit()]


def _set_aside(directory: Path, layout: Layout, files: Files) -> Path:
    """Keeps the damaged files under a second name."""
    stamp = time.strftime("%Y%m%dT%H%M%S")
    aside = directory / DAMAGED / stamp
    again = 1
    while aside.exists():
        again += 1
        aside = directory / DAMAGED / f"{stamp}-{again}"
    files.make_directory(aside)
    for path in (layout.snapshot, *layout.segments, *layout.outdated):
        if path is not None:
            try:
                files.link(path, aside / path.name)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                shutil.copy2(path, aside / path.name)  # a file system without links
    files.sync_dir(aside)
    return aside


def _begin_segment(files: Files, directory: Path, number: int, first_serial: int) -> None:
    fd = files.create(segment_path(directory, number))
    try:
        files.write(fd, records.encode_head(records.SegmentHead(number, first_serial, time.time())))
        files.sync(fd)
    finally:
        files.close(fd)
    files.sync_dir(directory)


def backup(directory: Path, target: Path, files: Files | None = None) -> Scan:
    """Copies a journal, which may be in use, to an empty folder, and checks the copy."""
    files = files or Files()
    if not _files_of(directory):
        raise JournalError(f"no journal in {directory}: it holds no segment and no snapshot")
    try:
        if target.exists() and any(target.iterdir()):
            raise JournalError(f"{target} is not empty; a backup needs a folder of its own")
        files.make_directory(target)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"no backup can be made in {shown(str(target))}: {error}") from error
    acknowledged = read_watermark(directory).acknowledged
    copied: set[Path] = set()
    while True:
        there = _files_of(directory)
        try:
            for path in there:
                if path not in copied:
                    _copy(path, target / path.name, files)
        except FileNotFoundError:
            continue  # a snapshot took the place of what was being copied
        copied.update(there[:-1])  # not the last, which grows: it is whole once another follows it
        if _files_of(directory) == there:
            break
    for path in read_layout(target).outdated:
        files.unlink(path)
    files.sync_dir(target)
    found = verify(target)
    if found.damage:
        raise JournalDamaged(f"the backup in {target} is damaged in {found.damage[0]}; is the journal itself sound?")
    if found.next_serial <= acknowledged:
        raise JournalDamaged(
            f"the backup in {target} lacks commits {found.next_serial} to {acknowledged}, which were acknowledged: "
            f"they are missing in {directory}"
        )
    WatermarkFile(files, target, synced=found.next_serial - 1).close()
    return found


def _files_of(directory: Path) -> list[Path]:
    layout = read_layout(directory)
    return [path for path in (layout.snapshot, *layout.segments) if path is not None]


def _copy(path: Path, target: Path, files: Files) -> None:
    shutil.copy2(path, target)
    fd = files.append_to(target)
    try:
        files.sync(fd)
    finally:
        files.close(fd)
