"""Payloads in a journal's files: steps' arrays and blobs that are not in memory, read when they are asked for.

A payload is known by its file, by where it lies there, and by a CRC32C of its own, taken when it was in memory: what
does not match it is damage, and is never given out. A file stays readable for as long as a payload refers to it, also
after a snapshot has taken its place in the folder.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
from crc32c import crc32c

from headrace.data.block import Blob, Record, StepHead, ids_bytes, log_probs_bytes
from headrace.data.frame import Buffer
from headrace.pool.errors import JournalDamaged, JournalError

#: Files of a journal that are open for reading at a time: a segment is 64 MB, and a process may have 1024 files open.
OPEN_FILES = 128
#: Bytes between two payloads that are rather read along than cost a system call.
GAP_BYTES = 1 << 14
#: Bytes that one system call reads at most of several payloads.
RUN_BYTES = 4 << 20
#: Where a step's ids and its log-probs begin, the CRC32C of both, and its fingerprint.
_PLACE = struct.Struct("<QQII")


class PayloadFile:
    """A file of a journal, open for reading once something in it was asked for."""

    def __init__(self, path: Path, cache: _OpenFiles) -> None:
        self.path = path
        self._cache = cache
        self._fd = -1
        self._held = False
        self._lock = threading.Lock()  # held while its descriptor is used

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def read(self, at: int, size: int) -> bytes:
        """So many bytes from `at` on; `JournalDamaged` where the file is shorter, `JournalError` where it cannot be
        read."""
        parts: list[bytes] = []
        left = size
        try:
            with self._lock:
                self._open()
                while left > 0:
                    part = os.pread(self._fd, left, at + size - left)
                    if not part:
                        raise JournalDamaged(
                            f"{self.path} is damaged: it ends before byte {at + size}, and a payload of {size} bytes "
                            f"begins at byte {at}. `headrace pool verify {self.path.parent}` says what else is"
                        )
                    parts.append(part)
                    left -= len(part)
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        if not self._held:
            self._cache.used(self)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def hold(self) -> None:
        """Keeps the file readable whatever becomes of its name. `JournalError` where it cannot be opened."""
        try:
            with self._lock:
                self._open()
                self._held = True
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        self._cache.forget(self)

    def close_idle(self) -> None:
        """Lets go of the descriptor; the next reading opens the file again."""
        with self._lock:
            if not self._held and self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def damaged(self, at: int, size: int) -> JournalDamaged:
        """The error for a payload that does not match its sum."""
        return JournalDamaged(
            f"{self.path} is damaged in bytes {at} to {at + size}: a payload there does not match its CRC32C. Nothing "
            f"of it was handed out; `headrace pool verify {self.path.parent}` says what else is damaged, and `headrace "
            f"pool repair {self.path.parent}`, once the pool is closed, puts what reads back in place"
        )

    def _open(self) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)


class _OpenFiles:
    """The files that were read last: those before them are closed."""

    def __init__(self) -> None:
        self._files: OrderedDict[int, PayloadFile] = OrderedDict()
        self._lock = threading.Lock()

    def used(self, file: PayloadFile) -> None:
        with self._lock:
            self._files[id(file)] = file
            self._files.move_to_end(id(file))
            idle = self._files.popitem(last=False)[1] if len(self._files) > OPEN_FILES else None
        if idle is not None:
            idle.close_idle()

    def forget(self, file: PayloadFile) -> None:
        with self._lock:
            self._files.pop(id(file), None)


class PayloadFiles:
    """The files of one journal that payloads may lie in. `held`: each is opened at once, since another process may put
    a snapshot in its place."""

    def __init__(self, *, held: bool = False) -> None:
        self._held = held
        self._cache = _OpenFiles()
        self._files: WeakValueDictionary[Path, PayloadFile] = WeakValueDictionary()

    def file(self, path: Path) -> PayloadFile:
        """The file of that name."""
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = PayloadFile(path, self._cache)
            if self._held:
                found.hold()
        return found

    def leaves(self, path: Path) -> None:
        """A file is about to be deleted: it stays readable for payloads that still refer to it."""
        found = self._files.pop(path, None)
        if found is not None:
            found.hold()


class BodyPlace:
    """Where a frame's body begins in a file."""

    __slots__ = ("at", "file")

    def __init__(self, file: PayloadFile, at: int) -> None:
        self.file = file
        self.at = at

    def arrays(self, ids_at: int, log_probs_at: int, record: Record) -> ArraysInFile:
        """Where the arrays of a record lie, which are in memory, by where they begin in the body."""
        ids, log_probs = record.arrays()
        head = record.head
        sampled = crc32c(log_probs, crc32c(record.response, head.keep + head.n_prompt))
        total = crc32c(log_probs, crc32c(ids))
        return ArraysInFile(self.file, _PLACE.pack(self.at + ids_at, self.at + log_probs_at, total, sampled))

    def moved(self, ids_at: int, log_probs_at: int, stored: ArraysInFile) -> ArraysInFile:
        """The same for arrays that were copied here from another file."""
        _, _, total, sampled = _PLACE.unpack(stored.place)
        return ArraysInFile(self.file, _PLACE.pack(self.at + ids_at, self.at + log_probs_at, total, sampled))

    def blob(self, at: int, data: Buffer) -> BytesInFile:
        """Where a blob lies, which is in memory."""
        return BytesInFile(self.file, self.at + at, len(data), crc32c(data))

    def moved_blob(self, at: int, stored: BytesInFile) -> BytesInFile:
        """The same for a blob that was copied here."""
        return BytesInFile(self.file, self.at + at, stored.size, stored.crc)


class ArraysInFile(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A step's arrays in a file. There are as many as steps: where they lie is packed into one run of bytes."""

    file: PayloadFile
    place: bytes

    @property
    def fingerprint(self) -> int:
        """CRC32C of the sampled ids and their log-probs, as tombstones keep it."""
        found: int = _PLACE.unpack(self.place)[3]
        return found

    def read(self, head: StepHead) -> tuple[bytes, bytes]:
        """The ids and the log-probs of the step with this head; `JournalDamaged` where they are not what was written,
        `JournalError` where they cannot be read."""
        ids_at, probs_at, _, _ = _PLACE.unpack(self.place)
        ids_size, probs_size = ids_bytes(head), log_probs_bytes(head)
        if ids_at + ids_size == probs_at or not probs_size:
            both = self.file.read(ids_at, ids_size + probs_size)
            return self.check(both[:ids_size], both[ids_size:])
        return self.check(self.file.read(ids_at, ids_size), self.file.read(probs_at, probs_size))

    def check(self, ids: bytes, log_probs: bytes) -> tuple[bytes, bytes]:
        """Both, unless they are not what was written (`JournalDamaged`)."""
        ids_at, probs_at, total, _ = _PLACE.unpack(self.place)
        if crc32c(log_probs, crc32c(ids)) != total:
            raise self.file.damaged(ids_at, probs_at + len(log_probs) - ids_at)
        return ids, log_probs

    def ranges(self, head: StepHead) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where ids and log-probs begin, and how many bytes they have."""
        ids_at, probs_at, _, _ = _PLACE.unpack(self.place)
        return (ids_at, ids_bytes(head)), (probs_at, log_probs_bytes(head))


class BytesInFile(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A blob in a file."""

    file: PayloadFile
    at: int
    size: int
    crc: int

    def read(self) -> bytes:
        """The blob; `JournalDamaged` where it is not what was written, `JournalError` where it cannot be read."""
        data = self.file.read(self.at, self.size)
        if crc32c(data) != self.crc:
            raise self.file.damaged(self.at, self.size)
        return data


class LoadedPayloads:
    """Payloads that were read for one call. `put` gives them to their records and blobs, `take_out` ends that: both are
    called with the pool's lock held, so that who looks sees all of a record or none."""

    def __init__(self, arrays: list[tuple[Record, bytes, bytes]], blobs: list[tuple[Blob, bytes]]) -> None:
        self._arrays = arrays
        self._blobs = blobs

    def put(self) -> None:
        for record, ids, log_probs in self._arrays:
            record.ids_in_memory, record.log_probs_in_memory = ids, log_probs
        for blob, data in self._blobs:
            blob.in_memory = data

    def take_out(self) -> None:
        for record, _, _ in self._arrays:
            record.ids_in_memory = record.log_probs_in_memory = None
        for blob, _ in self._blobs:
            blob.in_memory = None


def read_payloads(records: Sequence[Record], blobs: Sequence[Blob]) -> LoadedPayloads:
    """The payloads of records and blobs that are not in memory: read in the order in which they lie on the disk,
    neighbours at once. Raises `JournalDamaged` or `JournalError`."""
    by_file: dict[PayloadFile, list[_Wanted]] = {}
    for record in records:
        stored, head = record.stored, record.head
        assert isinstance(stored, ArraysInFile)
        ids_at, log_probs_at, total, _ = _PLACE.unpack(stored.place)
        wanted = (ids_at, ids_at + ids_bytes(head), log_probs_at, log_probs_at + log_probs_bytes(head), total, record)
        by_file.setdefault(stored.file, []).append(wanted)
    arrays: list[tuple[Record, bytes, bytes]] = []
    for file, some in by_file.items():
        some.sort(key=_ids_at)
        first = 0
        while first < len(some):
            last, end = _run(some, first)
            _read_run(file, some[first:last], end, arrays)
            first = last
    return LoadedPayloads(arrays, [(blob, blob.data) for blob in blobs])


#: Where a record's ids begin and end, the same of its log-probs, the CRC32C of both, and the record.
_Wanted = tuple[int, int, int, int, int, Record]


def _ids_at(wanted: _Wanted) -> int:
    return wanted[0]


def _run(some: list[_Wanted], first: int) -> tuple[int, int]:
    """How far one system call reads from the payload `first` on: the payload behind its last, and the byte."""
    begin, end, last = some[first][0], 0, first
    for at, ids_end, _, log_probs_end, _, _ in some[first:]:
        further = max(end, ids_end, log_probs_end)
        if last > first and (at - end > GAP_BYTES or further - begin > RUN_BYTES):
            break
        end, last = further, last + 1
    return last, end


def _read_run(file: PayloadFile, some: list[_Wanted], end: int, arrays: list[tuple[Record, bytes, bytes]]) -> None:
    """Reads payloads of a file, from the first one's beginning to `end`, or each by itself where little of that is
    asked for: the log-probs of a large submit lie far from its ids."""
    begin = some[0][0]
    asked = sum(each[1] - each[0] + each[3] - each[2] for each in some)
    data = file.read(begin, end - begin) if end - begin <= 2 * asked + GAP_BYTES else None
    for ids_at, ids_end, probs_at, probs_end, total, record in some:
        if data is None:
            ids, log_probs = file.read(ids_at, ids_end - ids_at), file.read(probs_at, probs_end - probs_at)
        else:
            ids, log_probs = data[ids_at - begin : ids_end - begin], data[probs_at - begin : probs_end - begin]
        if crc32c(log_probs, crc32c(ids)) != total:
            raise file.damaged(ids_at, probs_end - ids_at)
        arrays.append((record, ids, log_probs))
