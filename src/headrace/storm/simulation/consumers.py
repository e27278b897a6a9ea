"""Simulated trainers. One with leases writes down what it learned before it acknowledges, and skips what is written
down; it may be slow beyond its lease, give a batch back, and be killed at any time. One without asks under a name that
it has written down, and asks again under it when it was killed. They log what the storm's consumer logs."""

from __future__ import annotations

from collections.abc import Collection

from headrace.pool.errors import LeaseLost
from headrace.pool.operations.consume import AckLease, ExtendLease, FetchBatch, NackLease
from headrace.pool.views import HandOut
from headrace.storm.consumer import _record as learned_from
from headrace.storm.simulation.clients import Client, ClientKilled, World

#: Seconds of a lease, one of them each time.
LEASES_S = (2.0, 5.0, 20.0)
#: Groups asked for at once, one of them each time.
SIZES = (1, 1, 2, 4)
#: Seconds that a fetch waits for groups.
WAIT_S = 5.0
#: How often a consumer is slow beyond its lease, asks for more time, or gives a batch back unlearned.
OVERRUNS, EXTENDS, GIVES_BACK = 0.15, 0.1, 0.04
#: Seconds that learning from one trajectory takes, on average.
LEARNING_S = 0.02


class Checkpoint:
    """What consumers that share a model have learned from: written before anything is acknowledged, never lost."""

    def __init__(self) -> None:
        self.learned: set[str] = set()


class SimulatedConsumer(Client):
    """A consumer of one channel; `leased` says of which kind."""

    def __init__(self, world: World, name: str, channel: str, checkpoint: Checkpoint, *, leased: bool) -> None:
        # A fetch without a lease that arrives again after the next ones were answered would take what nobody receives.
        super().__init__(world, name, doubled=leased)
        self.leased = leased
        self.answers = 0  # that it has had
        self._channel, self._checkpoint = channel, checkpoint
        self._count = 0
        self._open: FetchBatch | None = None  # what it had asked for when it was killed

    async def run(self) -> None:
        """Takes groups for ever, over kills of its own."""
        while True:
            try:
                await self._once()
            except ClientKilled:
                await self.come_back()

    async def _once(self) -> None:
        """One batch, from its request to its end."""
        if self._open is None:
            self._count += 1
            self._open = FetchBatch(
                self.chance.choice(SIZES) if self._count % 2 else 1,
                channel=self._channel,
                order="latest" if self.chance.random() < 0.1 else "fifo",
                lease_s=self.chance.choice(LEASES_S) if self.leased else None,
                timeout=WAIT_S,
                request_id=f"{self.name}/{self._count}",
            )
            size, request = self._open.batch_size, self._open.request_id
            self.log("fetch.sent", channel=self._channel, request=request, size=size)
        fetch = self._open
        batch: HandOut | None
        batch, _ = await self.ask("fetch", self._channel, fetch)
        self.answers += 1
        if batch is None:
            self.log("nothing", request=fetch.request_id)
        else:
            uids = [trajectory.uid for group in batch.groups for trajectory in group.trajectories]
            about = {"channel": self._channel, "request": fetch.request_id, "lease": batch.lease}
            self.log("fetched", **about, trajectories=uids)
            if fetch.lease_s is None:
                await self._learn(batch, skips=False)
                self.log("acked", lease=batch.lease, trajectories=uids)
            else:
                await self._use(batch, uids, fetch.lease_s)
        self._open = None

    async def _use(self, batch: HandOut, uids: Collection[str], lease_s: float) -> None:
        """Learns from a batch that is leased, and ends the lease."""
        chance, lease = self.chance, batch.lease
        try:
            if chance.random() < GIVES_BACK:
                await self.ask("nack", lease, NackLease(lease, self._channel))
                self.log("nacked", lease=lease)
                return
            if chance.random() < EXTENDS:
                await self.ask("extend", lease, ExtendLease(lease, lease_s, self._channel))
            await self._learn(batch, skips=True)
            if chance.random() < OVERRUNS:
                await self.pause(lease_s * (0.5 + 2 * chance.random()))
            self.log("ack.sent", lease=lease)
            await self.ask("ack", lease, AckLease(lease, self._channel))
        except LeaseLost as error:
            self.log("ack.lost", lease=lease, why=error.code)
            return
        self.log("acked", lease=lease, trajectories=list(uids))

    async def _learn(self, batch: HandOut, *, skips: bool) -> None:
        """`skips`: it takes its time, and leaves out what it has written down; else it is done at once."""
        for group in batch.groups:
            for trajectory in group.trajectories:
                if skips:
                    await self.pause(self.chance.expovariate(1 / LEARNING_S))
                if skips and trajectory.uid in self._checkpoint.learned:
                    self.log("skipped", trajectory=trajectory.uid, lease=batch.lease)
                    continue
                self.log("trained", lease=batch.lease, **learned_from(group, trajectory))
                self._checkpoint.learned.add(trajectory.uid)
