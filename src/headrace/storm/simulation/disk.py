"""A simulated disk under the journal's real code: it knows what was synced, and what a power failure may take.

Files are real ones, in a folder in memory, so that whoever reads them reads them as always. Beside each is noted how
much of it is on the disk; beside the folder, which names are. A power failure keeps what was synced. Of what was not it
keeps all, nothing, a beginning, or any pages, with zeros for those between; of names that were made, moved or deleted
since the folder was synced, any. The journal's mark is smaller than a sector: it has one of the contents it was given.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.data.frame import Buffer
from headrace.pool.journal.files import PRIVATE, Files
from headrace.storm.simulation.scheduler import ProcessEnded, SimulatedScheduler

#: Bytes that reach the disk together. Small, so that even small frames can be torn.
PAGE = 64
#: Contents of the mark that are remembered until it is synced.
VERSIONS_KEPT = 8
#: Seconds that a sync takes: at least, and on average more.
SYNC_S, SYNC_MORE_S = 0.0005, 0.002
#: Seconds more while the disk is slow, on average.
SLOW_SYNC_S = 1.5


class SimulatedFile:
    """A file, whatever it is called: its content is in `path`, outside of the journal's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.synced = 0  # bytes from its beginning that are on the disk
        self.cut: bytes | None = None  # synced bytes that were cut off, until that is synced
        self.versions: list[bytes] = []  # contents of a file that is overwritten in place: the synced one, later ones
        self.reserved = 0


class SimulatedDisk:
    """The disk of the machine that the pool is on. `free_bytes`: room that is left, None while there is enough."""

    def __init__(self, folder: Path, scheduler: SimulatedScheduler, chance: random.Random) -> None:
        self.journal = folder / "journal"
        self._attic = folder / "files"
        self.journal.mkdir()
        self._attic.mkdir()
        self.scheduler = scheduler
        self.chance = chance
        self.free_bytes: int | None = None
        self.slow = False
        self.fail_next_sync = False
        self.entries: dict[str, SimulatedFile] = {}
        self._synced_entries: dict[str, SimulatedFile] = {}
        self._numbers = itertools.count()

    # -- names ---------------------------------------------------------------------------------------------------------

    def new_file(self, name: str) -> SimulatedFile:
        """Makes an empty file."""
        file = SimulatedFile(self._attic / str(next(self._numbers)))
        os.close(os.open(file.path, os.O_CREAT | os.O_WRONLY, PRIVATE))
        os.link(file.path, self.journal / name)
        self.entries[name] = file
        return file

    def unlink(self, name: str) -> None:
        file = self.entries.pop(name, None)
        (self.journal / name).unlink(missing_ok=True)
        if file is not None:
            self.give_room(file.size + file.reserved)
            self._let_go(file)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.journal / old, self.journal / new)
        replaced = self.entries.get(new)
        self.entries[new] = self.entries.pop(old)
        if replaced is not None:
            self._let_go(replaced)

    def sync_names(self) -> None:
        before = self._synced_entries
        self._synced_entries = dict(self.entries)
        for file in before.values():
            self._let_go(file)

    def _let_go(self, file: SimulatedFile) -> None:
        """Deletes the content of a file that has no name any more."""
        if file not in self.entries.values() and file not in self._synced_entries.values():
            file.path.unlink(missing_ok=True)

    # -- room ----------------------------------------------------------------------------------------------------------

    def take_room(self, size: int) -> int:
        """How many of so many bytes there is room for; they are taken."""
        if self.free_bytes is None:
            return size
        taken = min(size, self.free_bytes)
        self.free_bytes -= taken
        return taken

    def give_room(self, size: int) -> None:
        if self.free_bytes is not None:
            self.free_bytes += size

    # -- time and failure ----------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Lets a sync's time pass."""
        seconds = SYNC_S + self.chance.expovariate(1 / SYNC_MORE_S)
        if self.slow:
            seconds += self.chance.expovariate(1 / SLOW_SYNC_S)
        self.scheduler.sleep(seconds)

    def lose_power(self) -> None:
        """The machine stops and starts again: the folder holds what the disk may hold then."""
        now, synced, chance = self.entries, self._synced_entries, self.chance
        kept: dict[str, SimulatedFile] = {}
        for name in sorted({*now, *synced}):
            file = now.get(name) if now.get(name) is synced.get(name) or chance.random() < 0.5 else synced.get(name)
            if file is not None:
                kept[name] = file
        for name in now:
            (self.journal / name).unlink(missing_ok=True)
        for file in {id(file): file for file in kept.values()}.values():
            self._tear(file)
        for name, file in kept.items():
            os.link(file.path, self.journal / name)
        gone = [file for file in (*now.values(), *synced.values()) if file not in kept.values()]
        self.entries, self._synced_entries = dict(kept), dict(kept)
        for file in gone:
            file.path.unlink(missing_ok=True)

    def _tear(self, file: SimulatedFile) -> None:
        """Leaves of a file what a power failure may leave."""
        chance = self.chance
        if file.versions:
            file.versions = [chance.choice(file.versions)]
            file.path.write_bytes(file.versions[0])
            return
        data = bytearray(file.path.read_bytes())
        if file.cut is not None and len(data) == file.synced and chance.random() < 0.5:
            data += file.cut
        else:
            self.tear_end(data, file.synced)
        file.path.write_bytes(data)
        file.size = file.synced = len(data)
        file.cut = None

    def tear_end(self, data: bytearray, sound: int) -> None:
        """Takes some of the bytes behind `sound`: none, all, an end, or pages."""
        chance, behind = self.chance, len(data) - sound
        if not behind:
            return
        how = chance.randrange(4)
        if how == 0:
            return
        if how == 1:
            del data[sound:]
        elif how == 2:
            del data[sound + chance.randrange(behind) :]
        else:
            end = sound
            for at in range(sound, len(data), PAGE):
                stop = min(at + PAGE, len(data))
                if chance.random() < 0.5:
                    data[at:stop] = bytes(stop - at)
                else:
                    end = stop
            if chance.random() < 0.5:
                del data[end:]

    def delete(self) -> None:
        shutil.rmtree(self._attic.parent, ignore_errors=True)


class SimulatedFiles(Files):
    """The disk as one process sees it. `ended`: the process is gone, and does nothing more to the disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._open: dict[int, SimulatedFile] = {}
        self._failing: tuple[int, Callable[[], None]] | None = None
        self.ended = False

    def fail_within(self, calls: int, on_failure: Callable[[], None]) -> None:
        """Has the process end in the middle of a call, so many from now."""
        self._failing = calls, on_failure

    def end(self) -> None:
        """The process is gone, and its descriptors with it."""
        self.ended = True
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    def _call(self) -> None:
        if self.ended:
            raise ProcessEnded
        if self._failing is not None:
            calls, on_failure = self._failing
            self._failing = calls - 1, on_failure
            if not calls:
                on_failure()
                raise ProcessEnded

    # -- names ---------------------------------------------------------------------------------------------------------

    def create(self, path: Path) -> int:
        self._call()
        if path.name in self._disk.entries:
            raise FileExistsError(errno.EEXIST, "it is there", str(path))
        return self._opened(path, self._disk.new_file(path.name))

    def append_to(self, path: Path) -> int:
        self._call()
        return self._opened(path, self._disk.entries[path.name])

    def _opened(self, path: Path, file: SimulatedFile) -> int:
        fd = super().append_to(path)
        self._open[fd] = file
        return fd

    def open_to_update(self, path: Path) -> int:
        self._call()
        file = self._disk.entries.get(path.name)
        if file is None:
            file = self._disk.new_file(path.name)
            file.versions = [b""]
        fd = super().open_to_update(path)
        self._open[fd] = file
        return fd

    def sync_dir(self, directory: Path) -> None:
        self._call()
        self._disk.work()
        self._call()
        self._disk.sync_names()

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        self._disk.rename(old.name, new.name)

    def unlink(self, path: Path) -> None:
        self._call()
        self._disk.unlink(path.name)

    def close(self, fd: int) -> None:
        self._call()
        del self._open[fd]
        super().close(fd)

    def lock(self, directory: Path) -> int:
        """There is one process at a time: a lock has nobody to keep out."""
        self._call()
        return 1 << 30

    def unlock(self, fd: int) -> None:
        self._call()

    # -- contents ------------------------------------------------------------------------------------------------------

    def update(self, fd: int, data: bytes) -> None:
        self._call()
        super().update(fd, data)
        file = self._open[fd]
        file.versions = [file.versions[0], *file.versions[-VERSIONS_KEPT:], bytes(data)]

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        file = self._open[fd] if not self.ended else None
        data = b"".join(buffers)
        try:
            self._call()
        except ProcessEnded:
            if file is not None:
                self._append(fd, file, data[: self._disk.chance.randrange(len(data) + 1)])
            raise
        assert file is not None
        room = self._disk.take_room(len(data))
        self._append(fd, file, data[:room])
        if room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _append(self, fd: int, file: SimulatedFile, data: bytes) -> None:
        if data:
            os.write(fd, data)
            file.size += len(data)

    def truncate(self, fd: int, size: int) -> None:
        self._call()
        file = self._open[fd]
        if size < file.synced:
            file.cut = file.path.read_bytes()[size : file.synced]
            file.synced = size
        super().truncate(fd, size)
        self._disk.give_room(file.size - size)
        file.size = size

    def sync(self, fd: int) -> None:
        self._call()
        file = self._open[fd]
        size, versions = file.size, len(file.versions)
        self._disk.work()
        self._call()
        if self._disk.fail_next_sync and not versions:
            self._disk.fail_next_sync = False
            data = bytearray(file.path.read_bytes())
            self._disk.tear_end(data, file.synced)
            file.path.write_bytes(data)
            file.size = len(data)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.synced, file.cut = max(file.synced, min(size, file.size)), None
        if versions:
            file.versions = file.versions[versions - 1 :]

    def reserve(self, path: Path, size: int) -> None:
        self._call()
        name = path.name
        file = self._disk.entries.get(name) or self._disk.new_file(name)
        taken = self._disk.take_room(size)
        file.reserved += taken
        if taken < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
