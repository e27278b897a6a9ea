"""The journal's records: frames and their headers, how a file of them is read, and how a snapshot is written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.data import frame
from headrace.data.block import Block, BlockHeader, read_block
from headrace.data.errors import ForeignFrame, FrameError
from headrace.data.frame import FrameKind
from headrace.pool.facts import AnyFact, Fact
from headrace.pool.journal.files import Files, snapshot_path
from headrace.pool.journal.payloads import BodyPlace
from headrace.pool.scored.facts import ScoredFact

T = TypeVar("T")

#: A channel's ledger as a commit notes it: its name, the steps submitted, those consumed, those queued or leased. The
#: scored groups' has no name: groups posted, served, and there.
Tally = tuple[str, int, int, int]
#: The facts of a commit that holds none, and nothing, as msgpack.
NO_FACTS, NIL = msgspec.msgpack.encode([]), msgspec.msgpack.encode(None)
#: Bytes of facts that the next commit repeats, at most. A hand-out of a thousand groups is a tenth of that.
REPEATED_BYTES = 1 << 16

#: Bytes read past a frame, so that small ones do not cost a system call each.
READ_AHEAD_BYTES = 1 << 14
#: Bytes looked through at a time for the next frame behind damage.
SEARCH_BYTES = 1 << 20


class MovableBody(msgspec.Struct, gc=False, eq=False):
    """A body that is read when it is written, and told where it lies once the snapshot is in place."""

    def __call__(self) -> list[frame.Buffer]:
        raise NotImplementedError

    def moved(self, place: BodyPlace) -> None:
        raise NotImplementedError


class Captured(msgspec.Struct, gc=False, eq=False):
    """A snapshot's record: its header, and its body, or how to read that when it is written. There is one a group:
    none is work for the garbage collector."""

    header: bytes
    body: list[frame.Buffer] | Callable[[], list[frame.Buffer]]


class SegmentHead(msgspec.Struct):
    """The first frame of every file: which one it is, and the serial of the first commit after it."""

    number: int
    first_serial: int
    created_at: float


class Commit(msgspec.Struct, array_like=True):
    """What one call decided: facts that hold together or not at all, and the steps that go with them.

    `promised` is the last serial whose safety had been promised when this was written. What a crash may take lies
    behind every promise; so a commit that does not read back, and that a later one knows as promised, is damage.

    `tallies` and `repeated` serve a repair: the ledgers as they were before this commit, of the channels that it and
    the one before it are about, and the facts of the one before it, where no steps belong to them. So the loss of one
    commit loses no decision, and what is lost of the steps is counted.
    """

    facts: list[AnyFact | ScoredFact]
    block: BlockHeader | None = None
    promised: int = 0
    tallies: list[Tally] = []
    repeated: msgspec.Raw = msgspec.Raw(NO_FACTS)


class Dated(msgspec.Struct):
    """When a fact happened, read without the rest."""

    at: float = 0.0


class Outline(msgspec.Struct, array_like=True):
    """A commit, read without what it decided."""

    facts: msgspec.Raw
    block: msgspec.Raw = msgspec.Raw(NIL)
    promised: int = 0
    tallies: list[Tally] = []
    repeated: msgspec.Raw = msgspec.Raw(NO_FACTS)

    @property
    def at(self) -> float:
        """When it happened."""
        return max((fact.at for fact in _dates.decode(self.facts)), default=0.0)


class SegmentEnd(msgspec.Struct):
    """The last frame of a segment, written once the next one is there: if it is not found, it was lost."""

    next_number: int


class SnapshotEnd(msgspec.Struct):
    """The last frame of a snapshot: without it, it was never finished."""

    records: int


encode = msgspec.msgpack.Encoder().encode
_commits = msgspec.msgpack.Decoder(Commit)
_outlines = msgspec.msgpack.Decoder(Outline)
_dates = msgspec.msgpack.Decoder(list[Dated])
_heads = msgspec.msgpack.Decoder(SegmentHead)
_segment_ends = msgspec.msgpack.Decoder(SegmentEnd)
_snapshot_ends = msgspec.msgpack.Decoder(SnapshotEnd)


def _decoded(decoder: msgspec.msgpack.Decoder[T], found: frame.Frame) -> T:
    """What an undamaged frame's header holds; `ForeignFrame` where this release does not know it."""
    try:
        return decoder.decode(found.header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignFrame(
            f"frame {found.serial} holds what this release does not know ({error}): use the release that wrote it"
        ) from error


def _repeatable(facts: bytes, *, with_steps: bool) -> bytes:
    return NO_FACTS if with_steps or len(facts) > REPEATED_BYTES else facts


def encode_commit(
    facts: list[Fact],
    block: Block | None,
    promised: int = 0,
    tallies: Sequence[Tally] = (),
    repeated: bytes = NO_FACTS,
) -> tuple[bytes, bytes]:
    """A commit's header, and what the next one repeats of it."""
    packed = encode(facts)
    header = block.header() if block else None
    outline = (msgspec.Raw(packed), header, promised, tallies, msgspec.Raw(repeated))
    return encode(outline), _repeatable(packed, with_steps=block is not None)


def repeatable(header: bytes) -> bytes:
    """What the next commit repeats of one with this header: its facts, unless they need the steps that came with it."""
    outline = _outlines.decode(header)
    return _repeatable(bytes(outline.facts), with_steps=msgspec.msgpack.decode(outline.block) is not None)


def encode_repeated(repeated: bytes) -> bytes:
    """The header of a commit that only another one tells of."""
    return encode((msgspec.Raw(repeated),))


def decode_commit(found: frame.Frame) -> tuple[list[Fact], Block | None]:
    """A commit's facts and steps; `ForeignFrame` where this release does not know them."""
    commit = _decoded(_commits, found)
    try:
        return list(commit.facts), read_block(commit.block, found.body) if commit.block is not None else None
    except FrameError as error:
        raise ForeignFrame(f"commit {found.serial} holds steps that do not add up ({error})") from error


def decode_outline(found: frame.Frame) -> Outline:
    return _decoded(_outlines, found)


def encode_head(head: SegmentHead) -> list[frame.Buffer]:
    return frame.encode(FrameKind.SEGMENT, encode(head))


def decode_head(found: frame.Frame) -> SegmentHead:
    return _decoded(_heads, found)


def encode_segment_end(next_number: int) -> list[frame.Buffer]:
    return frame.encode(FrameKind.SEGMENT_END, encode(SegmentEnd(next_number)))


def decode_segment_end(found: frame.Frame) -> SegmentEnd:
    return _decoded(_segment_ends, found)


def encode_snapshot_end(records: int) -> list[frame.Buffer]:
    return frame.encode(FrameKind.SNAPSHOT_END, encode(SnapshotEnd(records)))


def decode_snapshot_end(found: frame.Frame) -> SnapshotEnd:
    return _decoded(_snapshot_ends, found)


class Reader:
    """The frames of a file. Read, not mapped: a disk that fails is then an `OSError` and not the process's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size
        # One buffer for all frames: a new one each time would leave as much memory behind as the steps themselves take.
        self._buffer = bytearray(2 * READ_AHEAD_BYTES)
        self._data = memoryview(b"")
        self._start = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def frame_at(self, at: int) -> frame.Frame:
        """The frame at `at`, or `FrameError`. Its bytes are good until another frame is asked for."""
        if not self._holds(at, frame.PREAMBLE_SIZE):
            self._read(at, frame.PREAMBLE_SIZE)
        lead = frame.read_preamble(self._data, at - self._start)
        if not self._holds(at, lead.padded_size):
            # The sizes are trusted only once the head has proved to be undamaged.
            self._read(at, frame.PREAMBLE_SIZE + lead.header_len)
            frame.read_head(self._data, 0)
            self._read(at, lead.padded_size)
        return frame.decode(self._data, at - self._start)._replace(path=self.path, body_at=at + lead.body_at)

    def next_frame(self, at: int) -> int | None:
        """Where the next frame that reads back begins, at or after `at`."""
        overlap = len(frame.MAGIC) - 1
        while at < self.size:
            stretch = os.pread(self._fd, SEARCH_BYTES, at)
            found = stretch.find(frame.MAGIC)
            if found < 0:
                if len(stretch) <= overlap:
                    return None
                at += len(stretch) - overlap
                continue
            at += found
            try:
                self.frame_at(at)
                return at
            except ForeignFrame:
                return at
            except FrameError:
                at += 1
        return None

    def blank(self, at: int) -> bool:
        """Whether nothing but zeros follows."""
        while stretch := os.pread(self._fd, SEARCH_BYTES, at):
            if stretch.strip(b"\0"):
                return False
            at += len(stretch)
        return True

    def _holds(self, at: int, size: int) -> bool:
        return self._start <= at and at + size <= self._start + len(self._data)

    def _read(self, at: int, size: int) -> None:
        wanted = min(size, self.size - at) + READ_AHEAD_BYTES
        if len(self._buffer) < wanted:
            self._buffer = bytearray(wanted + wanted // 4)
        into = memoryview(self._buffer)[:wanted]
        got = os.preadv(self._fd, [into], at)
        while got < wanted - READ_AHEAD_BYTES:  # a read may give less than was asked for
            more = os.preadv(self._fd, [into[got:]], at + got)
            if not more:
                break
            got += more
        self._data, self._start = into[:got], at


class SnapshotWriter:
    """A snapshot while it is written: it has its name only once it is whole and on the disk.

    `add` its records, then `finish` puts it in place, at once and for good; `abandon` leaves no trace.
    """

    def __init__(self, files: Files, directory: Path, number: int, first_serial: int) -> None:
        self.path = snapshot_path(directory, number)
        self._files = files
        self._draft = self.path.with_suffix(".tmp")
        self._records = 0
        files.unlink(self._draft)
        self._fd = files.create(self._draft)
        head = encode_head(SegmentHead(number, first_serial, time.time()))
        self._size = sum(map(len, head))
        try:
            files.write(self._fd, head)
        except BaseException:
            self.abandon()
            raise

    def add(self, header: bytes, body: Sequence[frame.Buffer]) -> int:
        """Writes one record; where in the file its body begins."""
        buffers = frame.encode(FrameKind.COMMIT, header, body)
        self._files.write(self._fd, buffers)
        body_at = self._size + len(buffers[0])
        self._size += sum(map(len, buffers))
        self._records += 1
        return body_at

    def finish(self) -> Path:
        """Puts the snapshot in place, durable; its path."""
        self._files.write(self._fd, encode_snapshot_end(self._records))
        self._files.sync(self._fd)
        self._close()
        self._files.rename(self._draft, self.path)
        self._files.sync_dir(self.path.parent)
        return self.path

    def abandon(self) -> None:
        """Deletes what was written."""
        self._close()
        self._files.unlink(self._draft)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)
