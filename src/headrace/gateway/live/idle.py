"""`Idle`: when each conversation was last heard of. Pure: time is an argument, and only ever goes on."""

from __future__ import annotations

from collections import OrderedDict


class Idle:
    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._last: OrderedDict[str, float] = OrderedDict()  # the quietest first

    def __len__(self) -> int:
        return len(self._last)

    def __contains__(self, uid: str) -> bool:
        return uid in self._last

    def touch(self, uid: str, now: float) -> None:
        self._last[uid] = now
        self._last.move_to_end(uid)

    def drop(self, uid: str) -> None:
        self._last.pop(uid, None)

    def due(self, now: float) -> list[str]:
        """Those that nobody was heard of for so long."""
        found: list[str] = []
        for uid, last in self._last.items():
            if now - last < self.after_s:
                break
            found.append(uid)
        return found

    def wait(self, now: float) -> float:
        """Seconds until one can be due."""
        last = next(iter(self._last.values()), now)
        return max(0.0, last + self.after_s - now)
