"""The file that keeps a rollouter's place in its data: read once at the start, written whole or not at all.

A process that is killed at any moment leaves either the state from before or the new one. One process at a time has the
file: a lock beside it, which the system gives back when its holder ends in whatever way.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path
from types import TracebackType

import msgspec

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.files import check_format, write_whole
from headrace.flows.schedule_state import FORMAT_VERSION, ScheduleState

#: Characters of a run's name, which is made up when its state is: enough that runs on one pool do not meet.
RUN_NAME_CHARS = 8


class RolloutStateFile:
    """The state of one run on disk; without a path, in memory alone. A context manager, which holds the lock."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock: int | None = None

    def __enter__(self) -> RolloutStateFile:
        """Raises `HeadraceError` where another process has the file."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(
                self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                self._lock = None
                raise HeadraceError(
                    f"another rollouter has {self.path}; end that one, or give this one a file of its own "
                    "(rollout.state)"
                ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self, rows: int, val_rows: int = 0) -> ScheduleState:
        """The state that was saved last, or a new one for data of so many rows. Raises `InvalidInput` where the file
        holds something else, or a later release's."""
        try:
            found = self.path.read_bytes() if self.path is not None else b""
        except FileNotFoundError:
            found = b""
        if not found:
            return ScheduleState(uuid.uuid4().hex[:RUN_NAME_CHARS], rows, val_rows)
        assert self.path is not None
        check_format(self.path, found, FORMAT_VERSION, "give another path as rollout.state to begin anew")
        try:
            state = msgspec.json.decode(found, type=ScheduleState)
            state.format_version = FORMAT_VERSION  # as it is saved from here on
            return state
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(
                f"{self.path} is no state of a rollouter ({error}); give another path as rollout.state, or remove it "
                "to begin anew"
            ) from None

    def save(self, state: ScheduleState) -> None:
        """Returns once the state is on disk, where there is a path."""
        self.write(msgspec.json.encode(state))

    def write(self, encoded: bytes) -> None:
        """Likewise, of a state that is encoded already: so another thread may do it."""
        if self.path is not None:
            write_whole(self.path, encoded, durable=True)
