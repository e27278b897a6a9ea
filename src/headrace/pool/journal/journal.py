"""The open journal: append, sync, rotate, snapshot. It knows bytes and facts, and nothing of what they mean.

`append` is called by one thread at a time (the pool holds its lock); `wait` may be called by many, and one of them
syncs for all. After an error that leaves the file's state in doubt, nothing more is written: the pool must be opened
again, which reads back what is there.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.data.block import Block
from headrace.data.errors import HeadraceError
from headrace.data.frame import Buffer, Frame, FrameKind
from headrace.data.frame import encode as encode_frame
from headrace.pool.config import Durability
from headrace.pool.errors import NO_ROOM, DiskFull, JournalDamaged, JournalError, JournalLocked
from headrace.pool.facts import Fact
from headrace.pool.journal import records
from headrace.pool.journal.files import (
    NEW_SEGMENT_BYTES,
    PRIVATE,
    Files,
    Reserve,
    WatermarkFile,
    number_of,
    read_layout,
    segment_path,
)
from headrace.pool.journal.payloads import BodyPlace, PayloadFile, PayloadFiles
from headrace.pool.journal.records import Captured, MovableBody, SnapshotWriter
from headrace.pool.journal.repair import holder, save_around
from headrace.pool.journal.scan import OnCommit, Scan, scan


class Journal:
    """A journal that is open for appending; at most one at a time has its directory."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        durability: Durability = "fsync",
        segment_mb: float = 64,
        quota_mb: float | None = None,
        files: Files | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.durability = durability
        self.segment_bytes = int(segment_mb * 1e6)
        self.quota_bytes = int(quota_mb * 1e6) if quota_mb is not None else None
        self.files = files or Files()
        self.serial = 1  # of the next commit
        self.number = 0
        self.torn: str | None = None
        self._fd = -1
        self._offset = 0  # bytes of the last segment
        self._before = 0  # bytes of the snapshot and of the segments before the last
        self._empty = True  # the last segment has no commit yet
        self._repeated = records.NO_FACTS  # what the next commit repeats of the last
        self._lock_fd = -1
        self._process = 0
        self.reserve = Reserve(self.files, self.directory)
        self.payloads = PayloadFiles()
        self._payload_file: PayloadFile | None = None  # the one of the last `place`
        self._payload_number = -1  # its number, where it is the last segment
        self._last_body_at = 0
        self._broken: str | None = None
        self.snapshot_bytes = 0  # of the snapshot that was written last, since the journal was opened
        self._written = 0  # the last serial handed to the kernel
        self._synced = 0  # the last serial known to be on the disk
        self._mark: WatermarkFile | None = None
        self._sync_lock = threading.Lock()  # held while the last segment is synced, replaced or closed

    @property
    def empty(self) -> bool:
        """Whether the last segment has no commit yet."""
        return self._empty

    @property
    def bytes(self) -> int:
        """Of all files that a recovery would read."""
        return self._before + self._offset

    # -- opening and closing -------------------------------------------------------------------------------------------

    def open(self, take: OnCommit) -> Scan:
        """Locks the directory, hands every commit on disk to `take`, and makes ready to append."""
        self._acquire()
        last = b""

        def remember(found: Frame) -> None:
            nonlocal last
            last = bytes(found.header) if found.serial else b""  # what is in a snapshot, its end makes whole
            take(found)

        try:
            found = scan(self.directory, remember)
            self._repeated = records.repeatable(last) if last else records.NO_FACTS
            if found.damage:
                raise JournalDamaged(
                    f"journal {self.directory} is damaged in {found.damage[0]}. Nothing was changed; {self._save()}. "
                    f"`headrace pool repair {self.directory}` puts what reads back in place"
                )
            try:
                self._begin(found)
            except OSError as error:
                raise self._error(f"journal {self.directory} cannot be opened for writing", error) from error
        except BaseException:
            if self._fd >= 0:
                self.files.close(self._fd)
                self._fd = -1
            if self._mark is not None:
                self._mark.close()
            self._release()
            raise
        return found

    def _acquire(self) -> None:
        try:
            self.files.make_directory(self.directory)
            self._lock_fd = self.files.lock(self.directory)
        except BlockingIOError:
            raise JournalLocked(
                f"journal {self.directory} is open in {holder(self.directory)}; connect to that pool, or close it first"
            ) from None
        except (FileExistsError, NotADirectoryError) as error:
            raise JournalError(
                f"{self.directory} cannot hold a journal: {error.filename} is a file, not a folder"
            ) from error
        except OSError as error:
            raise self._error(f"journal {self.directory} cannot be locked", error) from error
        self._process = os.getpid()

    def _release(self) -> None:
        if self._lock_fd >= 0:
            fd, self._lock_fd = self._lock_fd, -1
            if self._process == os.getpid():
                self.files.unlock(fd)
            else:
                self.files.close(fd)  # the lock is the parent's

    def _save(self) -> str:
        """Keeps what reads back of a damaged journal; how that went, in words."""
        try:
            saved = save_around(self.directory, self.files)
        except OSError as error:
            return f"what lies around it could not be copied ({error})"
        return f"everything around it ({saved.commits} commits) is saved in {saved.path}"

    def _begin(self, found: Scan) -> None:
        self.serial = found.next_serial
        self._written = self._synced = self.serial - 1
        if found.torn is not None and found.torn[2]:
            path, sound, size, why = found.torn
            self.torn = f"{path.name}: {size} bytes after byte {sound} were cut off ({why})"
            self._cut(path, sound, size)
        self._settle(found)
        for path in found.layout.outdated:
            self.files.unlink(path)
        if found.tail is None or found.tail[1] == 0:
            if found.tail is not None:
                self.files.unlink(found.tail[0])
                number = number_of(found.tail[0])
            else:
                number = number_of(found.layout.snapshot) if found.layout.snapshot is not None else 1
            self._before = found.bytes - (found.torn[2] if found.torn is not None else 0)
            self._start_segment(number)
        else:
            path, self._offset = found.tail
            self._before = found.bytes - self._offset - (found.torn[2] if found.torn is not None else 0)
            self._empty = False
            self.number = number_of(path)
            self._fd = self.files.append_to(path)
        self._mark = WatermarkFile(self.files, self.directory)
        self._mark.advance(self._written, self._synced if self.durability == "fsync" else None)
        self.reserve.take()

    def _settle(self, found: Scan) -> None:
        """Makes sure that the disk holds what was read: a process may have died between its write and its sync.

        The pool will answer for it (a retry is a duplicate), and will delete what it replaces.
        """
        if self.durability == "fsync":
            for path in found.layout.segments:
                fd = self.files.append_to(path)
                try:
                    self.files.sync(fd)
                finally:
                    self.files.close(fd)
        if found.layout.snapshot is not None or found.layout.segments:
            self.files.sync_dir(self.directory)

    def _cut(self, path: Path, sound: int, size: int) -> None:
        """Cuts a torn tail off. Bytes that are not just zeros are kept aside: a person may want to look at them."""
        with path.open("rb") as file:
            file.seek(sound)
            cut = file.read(size)
        if cut.strip(b"\0"):
            try:
                self._keep_aside(path.with_name(f"{path.stem}-{sound}.torn"), cut)
            except OSError as error:
                self.torn = f"{self.torn}; they could not be kept aside ({error})"
        fd = self.files.append_to(path)
        try:
            self.files.truncate(fd, sound)
            self.files.sync(fd)
        finally:
            self.files.close(fd)

    def _keep_aside(self, path: Path, data: Buffer) -> None:
        path.touch(PRIVATE)
        path.write_bytes(data)

    def close(self) -> None:
        """Syncs what was written, and lets go of the directory, whatever happens."""
        with self._sync_lock:
            try:
                if self._fd >= 0 and self._broken is None and self._process == os.getpid():
                    self._sync()
                    if self._mark is not None:
                        self._mark.sync()
            finally:
                fd, self._fd = self._fd, -1
                try:
                    if self._mark is not None:
                        self._mark.close()
                    if fd >= 0:
                        self.files.close(fd)
                finally:
                    self._release()

    # -- appending -----------------------------------------------------------------------------------------------------

    def append(self, facts: list[Fact], block: Block | None, tallies: Sequence[records.Tally] = ()) -> int:
        """Writes one commit and returns its serial. `DiskFull`: nothing of it is on disk, and nothing is broken."""
        self._check()
        promised = self._synced if self.durability == "fsync" else self._written
        header, repeatable = records.encode_commit(facts, block, promised, tallies, self._repeated)
        body, crc = (block.body(), block.body_crc()) if block is not None else ([], 0)
        buffers = encode_frame(FrameKind.COMMIT, header, body, serial=self.serial, body_crc=crc)
        size = sum(map(len, buffers))
        if block is not None:
            self._check_room(size)
        if not self._empty and self._offset + size > self.segment_bytes:
            try:
                self.rotate()
            except DiskFull:
                pass  # the segment grows past its size: where its commit has room, nothing is refused
        self._write(buffers, size, spare=block is None)
        self._last_body_at = self._offset + len(buffers[0])
        self._offset += size
        self.reserve.written(size)
        self._empty = False
        self._repeated = repeatable
        self._written = self.serial
        if self._mark is not None and self.durability != "fsync":
            self._mark.advance(self._written)
        self.serial += 1
        return self._written

    def last_place(self) -> BodyPlace:
        """Where the body of the last commit lies."""
        file = self._payload_file
        if file is None or self._payload_number != self.number:
            file = self._payload_file = self.payloads.file(segment_path(self.directory, self.number))
            self._payload_number = self.number
        return BodyPlace(file, self._last_body_at)

    def place(self, path: Path, body_at: int) -> BodyPlace:
        """Where a body lies in one of the journal's files."""
        if self._payload_file is None or self._payload_file.path != path:
            self._payload_file, self._payload_number = self.payloads.file(path), -1
        return BodyPlace(self._payload_file, body_at)

    def _check_room(self, size: int) -> None:
        """Refuses steps beyond the quota, and steps that would take the room kept for acknowledgements."""
        if self.quota_bytes is not None and self.bytes + size > self.quota_bytes:
            raise DiskFull(
                f"journal {self.directory} takes {self.bytes / 1e6:.1f} MB of its quota of "
                f"{self.quota_bytes / 1e6:.1f} MB, and this needs {size / 1e6:.1f} MB more; nothing was taken: fetch, "
                "compact, or raise the quota"
            )
        if self.reserve.spent:
            self.reserve.take()
            if self.reserve.spent:
                raise DiskFull(
                    f"no room on disk in {self.directory}: what is left is kept for acknowledgements; nothing was "
                    "taken: free some, then send it again"
                )

    def _write(self, buffers: Sequence[Buffer], size: int, *, spare: bool) -> None:
        try:
            self.files.write(self._fd, buffers)
        except BaseException as error:
            self._undo(error)
            if not isinstance(error, OSError):
                raise
            if error.errno not in NO_ROOM:
                raise JournalError(f"journal {self.directory} cannot be written: {error}") from error
            if spare and self._broken is None and self._use_reserve(error):
                return self._write(buffers, size, spare=False)
            raise DiskFull(
                f"no room on disk for {size} bytes in {self.directory} ({error.strerror}); "
                "nothing of it was stored: free some, then send it again"
            ) from error

    def _undo(self, cause: BaseException) -> None:
        """Takes a half-written commit back."""
        try:
            self.files.truncate(self._fd, self._offset)
        except OSError as error:
            self._broken = f"a write failed ({cause}) and could not be taken back ({error})"

    def _use_reserve(self, error: OSError) -> bool:
        """Acknowledgements free room: they may use what was kept for them. Whether there may be room now."""
        held = self.reserve.give_up()
        if error.errno == errno.EFBIG:
            self.rotate()  # it is the file that may not grow
            return True
        return held

    def _check(self) -> None:
        if self._broken is not None:
            raise JournalError(
                f"journal {self.directory}: {self._broken}; open the pool again to go on from what is on disk"
            )
        if self._fd < 0:
            raise JournalError(f"journal {self.directory} is closed")
        if self._process != os.getpid():
            raise JournalError(
                f"journal {self.directory} belongs to process {self._process}, which this one was forked from; "
                "connect to that pool instead"
            )

    # -- durability ----------------------------------------------------------------------------------------------------

    def durable(self, serial: int) -> bool:
        """Whether a commit is as safe as promised."""
        return self.durability != "fsync" or serial <= self._synced

    def wait(self, serial: int) -> None:
        """Returns once the commit is as safe as promised. Of many that wait, one syncs for all."""
        if self.durable(serial):
            return
        with self._sync_lock:
            if serial > self._synced:
                self._sync()

    def _sync(self) -> None:
        """Called with the sync lock held, so that the last segment stays the last."""
        self._check()
        upto = self._written
        try:
            self.files.sync(self._fd)
        except OSError as error:
            # After a failed sync the kernel may have dropped the pages: what is on disk is unknown until read back.
            self._broken = f"a sync failed ({error})"
            self._check()
        self._synced = max(self._synced, upto)
        if self._mark is not None:
            self._mark.advance(self._synced, self._synced)

    # -- segments and snapshots ----------------------------------------------------------------------------------------

    def rotate(self, *, spare: bool = False) -> int:
        """Begins the next segment. With `fsync`, the old one is on the disk before anything is written to the new.
        `spare`: it may use the room that is kept for acknowledgements."""
        with self._sync_lock:
            self._check()
            if self.durability == "fsync":
                self._sync()
                if self._mark is not None:
                    self._mark.sync()
            old, size = self._fd, self._offset
            try:
                self._start_segment(self.number + 1)
            except DiskFull:
                if not spare or not self.reserve.give_up():
                    raise
                self._start_segment(self.number + 1)
            self._before += size + self._end_segment(old, size)
            self.files.close(old)
            if self.reserve.spent and not spare:
                self.reserve.take()
        return self.number

    def _start_segment(self, number: int) -> None:
        path = segment_path(self.directory, number)
        head = records.encode_head(records.SegmentHead(number, self.serial, time.time()))
        try:
            fd = self.files.create(path)
            try:
                self.files.write(fd, head)
                self.files.sync(fd)
                self.files.sync_dir(self.directory)
            except BaseException:
                self.files.close(fd)
                self.files.unlink(path)
                raise
        except OSError as error:
            raise self._error(f"no new segment in {self.directory}", error) from error
        self._fd, self.number, self._offset, self._empty = fd, number, sum(map(len, head)), True

    def _end_segment(self, fd: int, size: int) -> int:
        """Notes in the old segment that another follows, so that its loss would be seen. How many bytes that took."""
        end = records.encode_segment_end(self.number)
        try:
            self.files.write(fd, end)
            if self.durability == "fsync":
                self.files.sync(fd)
        except OSError:
            return 0  # what is left of it is no commit, and the next segment says so
        return sum(map(len, end))

    def write_snapshot(self, number: int, first_serial: int, captured: Sequence[Captured]) -> None:
        """Writes the state that segment `number` begins with; everything older is deleted once it is on the disk. It
        may use the room that is kept for acknowledgements: it makes more."""
        self.reserve.clear_alarm()
        try:
            path, bodies = self._draft(number, first_serial, captured)
        except DiskFull:
            try:
                if not self.reserve.give_up():
                    raise
                path, bodies = self._draft(number, first_serial, captured)
            except DiskFull:
                self.reserve.take(less=NEW_SEGMENT_BYTES)  # it was of no use, and acknowledgements must have it
                raise
        file = self.payloads.file(path)
        for record, body_at in zip(captured, bodies, strict=True):
            if isinstance(record.body, MovableBody):
                record.body.moved(BodyPlace(file, body_at))
        try:
            for outdated in read_layout(self.directory).outdated:
                self._leave(outdated)
                self.files.unlink(outdated)
            self.files.sync_dir(self.directory)
        except OSError as error:
            raise JournalError(f"what {path} replaces could not be deleted: {error}") from error
        with self._sync_lock:
            layout = read_layout(self.directory)
            older = [segment for segment in layout.segments if number_of(segment) < self.number]
            self.snapshot_bytes = path.stat().st_size
            self._before = self.snapshot_bytes + sum(segment.stat().st_size for segment in older)
            self.reserve.take()

    def _leave(self, path: Path) -> None:
        """Has a file that is about to go stay readable for payloads that still refer to it."""
        if self._payload_file is not None and self._payload_file.path == path:
            self._payload_file = None
        self.payloads.leaves(path)

    def _draft(self, number: int, first_serial: int, captured: Sequence[Captured]) -> tuple[Path, list[int]]:
        """Writes a snapshot and puts it in place; its path, and where the body of each record begins."""
        try:
            draft = SnapshotWriter(self.files, self.directory, number, first_serial)
            try:
                bodies = [
                    draft.add(each.header, each.body() if callable(each.body) else each.body) for each in captured
                ]
                self._leave(draft.path)  # one of the same number may be there, which nothing was written after
                return draft.finish(), bodies
            except BaseException:
                draft.abandon()
                raise
        except OSError as error:
            raise self._error(f"no snapshot in {self.directory}, the segments are untouched", error) from error

    def _error(self, what: str, error: OSError) -> HeadraceError:
        kind = DiskFull if error.errno in NO_ROOM else JournalError
        return kind(f"{what}: {error}")
