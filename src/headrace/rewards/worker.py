"""`RewardWorker`: whoever scores samples for others, in this process or elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.rewards.config import RewardConfig
from headrace.rewards.reward import Reward
from headrace.rewards.sample import Sample
from headrace.rewards.source import Outcome, RewardCounters


class RewardWorker(Protocol):
    """Scores samples. Several calls may be under way at once."""

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One `Score` or `RewardFailure` for each sample, in their order."""

    async def aclose(self) -> None:
        """Ends what it started."""


class LocalRewardWorker(RewardWorker):
    """A reward in this process: rules here, blocking ones and functions in processes of its own.

    At most the configuration's `concurrency` samples are under way at once, over all calls; who comes later waits.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._reward = Reward(config)
        self._free = config.concurrency
        self._changed = asyncio.Condition()

    @property
    def counters(self) -> RewardCounters:
        """What was done so far."""
        return self._reward.counters

    async def ready(self) -> None:
        """As `Reward.ready`."""
        await self._reward.ready()

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        found: list[Outcome] = []
        while len(found) < len(samples):
            taken = await self._take(len(samples) - len(found))
            try:
                found += await self._reward.score(samples[len(found) : len(found) + taken])
            finally:
                async with self._changed:
                    self._free += taken
                    self._changed.notify_all()
        return found

    async def aclose(self) -> None:
        await self._reward.aclose()

    async def _take(self, wanted: int) -> int:
        """Takes up to so many of the free places, at least one, once there are any."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free > 0)
            taken = min(wanted, self._free)
            self._free -= taken
            return taken
