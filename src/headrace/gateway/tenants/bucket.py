"""`Bucket`: how much may be used now, where so much comes in a second and no more than so much is saved up. Pure.

Of `n` seconds, at most `most + rate * n` can be taken. What is only known afterwards may be taken beyond the bottom:
whoever owes waits until it is paid back.
"""

from __future__ import annotations

import msgspec


class Bucket(msgspec.Struct, frozen=True):
    rate: float
    most: float
    level: float
    since: float

    @classmethod
    def full(cls, rate: float, most: float, now: float) -> Bucket:
        return cls(rate, most, most, now)

    def at(self, now: float) -> Bucket:
        """The bucket as it is now. A clock that goes back brings nothing."""
        passed = max(0.0, now - self.since)
        return Bucket(self.rate, self.most, min(self.most, self.level + self.rate * passed), self.since + passed)

    def wait(self, now: float, amount: float) -> float:
        """Seconds until so much can be taken; 0 where it can be now. More than `most` is as much as `most`."""
        lacking = min(amount, self.most) - self.at(now).level
        return max(0.0, lacking / self.rate)

    def less(self, now: float, amount: float) -> Bucket:
        """The bucket once so much was taken, whether or not it was there."""
        filled = self.at(now)
        return Bucket(self.rate, self.most, filled.level - amount, filled.since)
