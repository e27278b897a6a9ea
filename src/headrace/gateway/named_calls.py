"""A call that has a name is carried out by one worker at a time, however many of its tries come at once.

Workers share one file. A call's name is a place in it, and who carries the call out has a lock there: the kernel's,
which goes with its process, however that ends. Another try waits until the first is recorded, and then finds its answer
in the pool.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path

#: Seconds between looks at a lock that another worker has.
LOOK_S = 0.02


class NamedCalls:
    """The locks as one worker has them. Tries in the same worker share one: they find each other by other means."""

    def __init__(self, path: Path) -> None:
        """The file at `path` is made where it is not there."""
        self._file = path.open("a+b")
        self._users: Counter[int] = Counter()

    @asynccontextmanager
    async def alone(self, *name: str) -> AsyncIterator[None]:
        """Waits until no other worker carries out the call with this name; none begins to before the block ends."""
        place = place_of(*name)
        while not self.take(place):
            await asyncio.sleep(LOOK_S)
        try:
            yield
        finally:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def take(self, place: int) -> bool:
        """Takes a lock, once more where this worker has it; False where another has."""
        if not self._users[place]:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):
                del self._users[place]
                return False
        self._users[place] += 1
        return True


def place_of(*name: str) -> int:
    """Where in the file a name's lock is."""
    digest = blake2b("\0".join(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2  # its end is within what the kernel counts to
