"""Reading a journal: every commit in order, and an account of what could not be read.

Torn tail: what a crash in the middle of a write leaves at the end of the last segment. Nothing whose safety had been
promised is in it. A power failure may keep the later of two writes and lose the earlier, so whole frames can follow
the gap; each says what had been promised when it was written, and so tells the two apart. Everything else that does
not read back is damage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from headrace.data.errors import ForeignFrame, FrameError
from headrace.data.frame import Frame, FrameKind
from headrace.pool.errors import JournalError
from headrace.pool.journal.files import (
    RESERVE,
    Layout,
    number_of,
    read_layout,
    read_watermark,
    segment_path,
)
from headrace.pool.journal.records import (
    Reader,
    decode_head,
    decode_outline,
    decode_segment_end,
    decode_snapshot_end,
)

#: Gets each commit that reads back, as its frame.
OnCommit = Callable[[Frame], None]

#: A segment's head is smaller than this. Of a file that was only begun, no more than its head can be torn.
MAX_HEAD_BYTES = 256


@dataclass(slots=True)
class Damage:
    """A stretch that does not read back, or a whole file that is not there (`end` None)."""

    path: Path
    start: int
    end: int | None
    why: str

    def __str__(self) -> str:
        where = f"bytes {self.start} to {self.end}" if self.end is not None else "the whole file"
        return f"{self.path.name}, {where}: {self.why}"


@dataclass(slots=True)
class Scan:
    """What a reading found. `next_serial` follows the last commit; `tail` is the last segment and its sound length;
    `torn` is that segment, its sound length, how many bytes follow it, and what is wrong with them; `acknowledged` is
    the last commit that the journal's mark names."""

    layout: Layout
    commits: int = 0
    bytes: int = 0
    next_serial: int = 1
    damage: list[Damage] = field(default_factory=list)
    torn: tuple[Path, int, int, str] | None = None
    tail: tuple[Path, int] | None = None
    acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Hole:
    """Damage that lies before a commit, or at the journal's end. `lost`: the commit just before that one is not there,
    neither by itself nor in a snapshot."""

    damage: tuple[Damage, ...]
    lost: bool


#: Gets each hole, and the commit behind it, or None where none is.
OnHole = Callable[[Hole, Frame | None], None]


def scan(
    directory: Path,
    take: OnCommit,
    *,
    tolerant: bool = False,
    missed: OnHole | None = None,
) -> Scan:
    """Hands every commit that reads back to `take`, in order. Stops at the first damage, or notes it and goes on: then
    `missed` hears of each hole, before the commit behind it is taken (None: none is)."""
    acknowledged = read_watermark(directory).acknowledged  # first: a pool that has the journal open goes on writing
    layout = read_layout(directory)
    reading = _Reading(layout, take, tolerant, missed)
    reading.found.acknowledged = acknowledged
    try:
        reading.all(directory)
    except _Stop:
        pass
    except ForeignFrame as error:
        raise JournalError(
            f"journal {directory} is of another release: {reading.where}, {error}. Nothing was changed"
        ) from error
    except OSError as error:
        raise JournalError(f"journal {directory} cannot be read: {error}") from error
    return reading.found


class _Stop(Exception):
    """The first damage of a reading that is not tolerant."""


class _Reading:
    def __init__(
        self,
        layout: Layout,
        take: OnCommit,
        tolerant: bool,
        missed: OnHole | None,
    ) -> None:
        self.found = Scan(layout)
        self.take = take
        self.tolerant = tolerant
        self.missed = missed
        self.told = 0  # damage that `missed` has heard of
        self.held = 0 if layout.snapshot is None else -1  # the last commit that was taken, or is in the snapshot
        self.serial: int | None = 1  # of the next commit; None: unknown, since something before it is lost
        self.open_end: Damage | None = None  # bytes at a segment's end; noise, if the next segment follows on
        self.promised_number = 0  # the segment that the one before it says follows
        self.where = ""

    def all(self, directory: Path) -> None:
        layout = self.found.layout
        if layout.snapshot is not None:
            self._snapshot(layout.snapshot)
        missing = list(layout.missing)
        for path in layout.segments:
            while missing and missing[0] < number_of(path):
                self._lost(segment_path(directory, missing.pop(0)), path)
            self._segment(path, path == layout.segments[-1])
        last = number_of(layout.segments[-1]) if layout.segments else 0
        if self.promised_number > last:
            missing.append(self.promised_number)
        for number in missing:
            self._lost(segment_path(directory, number), None)
        if self.serial is not None and self.serial <= self.found.acknowledged:
            path, at = self.found.tail or (segment_path(directory, 1), 0)
            why = f"commits {self.serial} to {self.found.acknowledged} were acknowledged, and are missing at its end"
            self._note(Damage(path, at, at, why))
        self._tell(None, lost=True)

    def _tell(self, frame: Frame | None, *, lost: bool) -> None:
        """Says what is missing before a commit."""
        damage = self.found.damage[self.told :]
        if damage and self.missed is not None:
            self.missed(Hole(tuple(damage), lost), frame)
        self.told = len(self.found.damage)

    def _lost(self, path: Path, following: Path | None) -> None:
        why = "the segment is missing"
        first = _first_serial(following) if following is not None else None
        if self.serial is not None and first is not None and first > self.serial:
            why += f"; commits {self.serial} to {first - 1} are missing with it"
        self.serial = None
        self._note(Damage(path, 0, None, why))

    def _note(self, damage: Damage) -> None:
        self.found.damage += [self.open_end, damage] if self.open_end is not None else [damage]
        self.open_end = None
        if not self.tolerant:
            raise _Stop

    # -- a snapshot ----------------------------------------------------------------------------------------------------

    def _snapshot(self, path: Path) -> None:
        found, records, ended, at = self.found, 0, False, 0
        with Reader(path) as reader:
            found.bytes += reader.size
            while at < reader.size:
                try:
                    frame = self._frame(reader, at)
                    if frame.kind == FrameKind.COMMIT:
                        self._tell(frame, lost=True)
                        self.take(frame)
                        records += 1
                    elif frame.kind == FrameKind.SNAPSHOT_END:
                        ended = decode_snapshot_end(frame).records == records
                    elif frame.kind == FrameKind.SEGMENT:
                        self.serial = found.next_serial = decode_head(frame).first_serial
                        self.held = self.serial - 1
                    at += frame.size
                except ForeignFrame:
                    raise
                except FrameError as error:
                    at = self._skip(reader, at, str(error))
        if not ended and not found.damage:
            self._note(Damage(path, at, at, "the snapshot has no end, or not all of its records"))

    # -- a segment -----------------------------------------------------------------------------------------------------

    def _segment(self, path: Path, last: bool) -> None:
        at = 0
        with Reader(path) as reader:
            self.found.bytes += reader.size
            while at < reader.size or not reader.size:
                try:
                    if not reader.size:
                        raise FrameError("the file is empty")
                    frame = self._frame(reader, at)
                    if at == 0 and frame.kind != FrameKind.SEGMENT:
                        raise FrameError("the segment does not begin with its head")
                    if not self._accept(reader, at, frame, last):
                        break
                    at += frame.size
                except ForeignFrame:
                    raise
                except FrameError as error:
                    if last and self._torn(reader, at, str(error)):
                        break
                    after = reader.next_frame(at + 1)
                    if after is None and not last and self.serial is not None:
                        # Whether anything is lost here, the next segment's first serial tells.
                        self.open_end = Damage(path, at, reader.size, str(error))
                        return
                    at = self._skip(reader, at, str(error))
                    if not reader.size:
                        break
        if last:
            self.found.tail = (path, at)

    def _frame(self, reader: Reader, at: int) -> Frame:
        self.where = f"{reader.path.name} at byte {at}"
        frame = reader.frame_at(at)
        if frame.kind not in (FrameKind.SEGMENT, FrameKind.COMMIT, FrameKind.SEGMENT_END, FrameKind.SNAPSHOT_END):
            raise ForeignFrame(f"a frame of kind {frame.kind}, which no journal of this release holds")
        return frame

    def _accept(self, reader: Reader, at: int, frame: Frame, last: bool) -> bool:
        """Takes a frame that reads back; false where it lies behind a gap that a crash left."""
        if frame.kind == FrameKind.SEGMENT_END:
            self.promised_number = decode_segment_end(frame).next_number
            return True
        if frame.kind == FrameKind.SEGMENT:
            self._continue(reader.path, decode_head(frame).first_serial)
            return True
        serial = frame.serial
        if self.serial is not None and serial < self.serial:
            self._note(Damage(reader.path, at, at, f"commit {serial} stands where {self.serial} was expected"))
            return True  # it was taken before
        if self.serial is not None and serial > self.serial:
            why = f"commits {self.serial} to {serial - 1} are missing"
            if last and self._torn(reader, at, why):
                return False
            self._note(Damage(reader.path, at, at, why))
            frame = reader.frame_at(at)  # others were looked at since
        self.serial = serial + 1
        self.found.next_serial = max(self.found.next_serial, self.serial)
        self.found.commits += 1
        self._tell(frame, lost=serial - 1 > self.held)
        self.held = serial
        self.take(frame)
        return True

    def _continue(self, path: Path, first_serial: int) -> None:
        """A segment begins: with the serial that is due, or commits between the two were lost."""
        if self.serial is not None and first_serial != self.serial:
            self._note(Damage(path, 0, 0, f"commits {self.serial} to {first_serial - 1} are missing before it"))
        self.open_end = None
        if self.held < 0:
            self.held = first_serial - 1  # the snapshot's own head is damaged: it ends where its segment begins
        self.serial = first_serial
        self.found.next_serial = max(self.found.next_serial, first_serial)

    def _torn(self, reader: Reader, at: int, why: str) -> bool:
        """Whether all from `at` to the end of the last segment was never promised; it is then noted as torn."""
        if self.serial is None or self.serial <= self.found.acknowledged:
            return False
        if at == 0 and (self.open_end is not None or (reader.size > MAX_HEAD_BYTES and not reader.blank(0))):
            return False  # the segment before it, and then its head, are whole before anything else is written
        if at == 0 and self._had_a_head(reader.path):
            return False
        behind = reader.next_frame(at)
        while behind is not None:
            frame = reader.frame_at(behind)
            if frame.kind != FrameKind.COMMIT or decode_outline(frame).promised >= self.serial:
                return False
            behind = reader.next_frame(behind + frame.size)
        self.found.torn = (reader.path, at, reader.size - at, why)
        return True

    def _had_a_head(self, path: Path) -> bool:
        """Whether a segment that does not begin with its head once did: what is only written after that is there."""
        number, snapshot = number_of(path), self.found.layout.snapshot
        if self.promised_number == number or (snapshot is not None and number_of(snapshot) == number):
            return True
        return number == 1 and (path.parent / RESERVE).exists()

    def _skip(self, reader: Reader, at: int, why: str) -> int:
        """Notes the damage at `at`; where to go on."""
        after = reader.next_frame(at + 1)
        end = after if after is not None else reader.size
        self.serial = None
        self._note(Damage(reader.path, at, end, why))
        return end


def _first_serial(path: Path) -> int | None:
    with Reader(path) as reader:
        try:
            return decode_head(reader.frame_at(0)).first_serial
        except FrameError:
            return None
