"""What grows while a system only works: memory, descriptors and threads of every process, tasks of the gateway's and
the API's event loops, files, latencies, over time.

`growth_of` fits a line through what was sampled after the warm-up. Its error is that of independent samples; where what
is sampled goes up and down slowly, as a journal does that is compacted, the real one is larger.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, quantiles

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.storm.agents import StormAgents
from headrace.storm.log import EventLog
from headrace.storm.system import System

#: The first part of a soak, which is not looked at: caches fill, allocators find their size.
WARM_UP = 1 / 3
SAMPLES = 240
#: A channel's rules in a soak: it remembers so few of the trajectories that it handed out that their number is what it
#: will always be when the warm-up of an hour's soak is over.
SOAKED_CHANNEL = {"tombstones": 4_000}
LEAST_SAMPLE_S = 0.5
#: Seconds between two bursts, in which twice as many agents work, and how long one takes, as a share of that. A shorter
#: soak has six bursts.
BURST_EVERY_S = 600.0
BURST_SHARE = 0.1
#: Seconds that an agent rests between two groups, on average.
REST_S = 0.2
#: What grows: within what was looked at, by more than so much of its mean, by more than a few of its unit (connections
#: come and go), and by more than so many of its errors.
GROWS_SHARE = 0.1
GROWS_LEAST = {"memory MB": 8.0, "descriptors": 24.0, "threads": 3.0, "tasks": 24.0, "ms": 50.0}
GROWS_ERRORS = 4.0
#: Processes that tell how many tasks their event loops have, and the seconds that they may take for it.
SCRAPED, SCRAPE_S = ("gateway", "api"), 30.0
#: Growth that is told and not judged: a journal grows until it is compacted.
NOT_JUDGED = ("bytes",)


class Growth(msgspec.Struct, frozen=True):
    """How one figure changes: by how much in an hour, with the error of that, around its mean, in what time."""

    what: str
    mean: float
    per_hour: float
    error: float
    seconds: float

    @property
    def grows(self) -> bool:
        """Whether it certainly grew while it was looked at, and by enough to matter."""
        if self.what.endswith(NOT_JUDGED):
            return False
        least = next((value for unit, value in GROWS_LEAST.items() if self.what.endswith(unit)), 0.0)
        grown = self.per_hour * self.seconds / 3600
        return self.per_hour > GROWS_ERRORS * self.error and grown > max(GROWS_SHARE * self.mean, least)

    def __str__(self) -> str:
        return f"{self.what}: {self.mean:,.4g} on average, {self.per_hour:+,.3g} ± {self.error:,.2g} an hour"


def growth_of(what: str, samples: Sequence[tuple[float, float]]) -> Growth:
    """The line through samples of (seconds, value), at least three of them."""
    seconds, values = [at for at, _ in samples], [value for _, value in samples]
    middle, mean = fmean(seconds), fmean(values)
    spread = sum((at - middle) ** 2 for at in seconds)
    slope = sum((at - middle) * (value - mean) for at, value in samples) / spread
    left = sum((value - mean - slope * (at - middle)) ** 2 for at, value in samples)
    error = math.sqrt(left / (len(samples) - 2) / spread)
    return Growth(what, mean, slope * 3600, error * 3600, max(seconds) - min(seconds))


class Soak:
    """Load without faults, for a while; what every process uses meanwhile."""

    def __init__(self, system: System, agents: StormAgents, log: EventLog, count: int) -> None:
        """`count`: agents at once, twice as many in a burst."""
        self._system, self._agents, self._log, self._count = system, agents, log, count
        self._client = AsyncHttpClient(total_s=SCRAPE_S)
        self._sampled: dict[str, list[tuple[float, float]]] = {}

    async def run(self, seconds: float) -> list[Growth]:
        """Plays agents and samples for so long; growth of every figure after the warm-up, in a fixed order."""
        begun = time.monotonic()
        every = max(LEAST_SAMPLE_S, seconds / SAMPLES)
        period = min(BURST_EVERY_S, seconds / 6)
        playing = [asyncio.create_task(self._agents.run(number, REST_S)) for number in range(self._count)]
        bursts: list[asyncio.Task[None]] = []
        numbers = iter(range(self._count, 10**9))
        while (passed := time.monotonic() - begun) < seconds:
            due = int(passed / period)
            if due and len(bursts) < due * self._count:
                self._log.write("burst")
                length = period * BURST_SHARE
                bursts += [asyncio.create_task(self._burst(next(numbers), length)) for _ in range(self._count)]
            await self._sample(passed)
            await asyncio.sleep(every)
        self._agents.stopping = True
        await asyncio.gather(*playing, *bursts)
        await self._client.close()
        after = seconds * WARM_UP
        late = {what: [(at, value) for at, value in found if at > after] for what, found in self._sampled.items()}
        return [growth_of(what, found) for what, found in sorted(late.items()) if len(found) > 2]

    async def _burst(self, number: int, seconds: float) -> None:
        """One more agent for a while; a group that it began is played to its end."""
        until = time.monotonic() + seconds
        await self._agents.run(number, REST_S, until)

    async def _sample(self, passed: float) -> None:
        figures = await self._tasks()
        for name, service in self._system.services.items():
            for process, pid in _family(name, service.pid, service.descendants):
                for what, value in usage_of(pid).items():
                    figures[f"{process} {what}"] = value
        figures["journal bytes"] = _size(self._system.journal)
        figures["outbox bytes"] = _size(self._system.outbox)
        recent = [seconds for _, seconds in self._agents.latencies]
        self._agents.latencies.clear()
        if len(recent) > 1:
            figures["call p50 ms"] = quantiles(recent, n=2)[0] * 1e3
            figures["call p95 ms"] = quantiles(recent, n=20)[-1] * 1e3
        self._log.write("usage", figures=figures)
        for what, value in figures.items():
            self._sampled.setdefault(what, []).append((passed, value))

    async def _tasks(self) -> dict[str, float]:
        """The tasks of each event loop that tells them; none where a process does not answer in time."""
        found: dict[str, float] = {}
        for name in SCRAPED:
            with contextlib.suppress(NoAnswer):
                url = f"{self._system.services[name].address}/metrics"
                answer = await self._client.request("GET", url, headers=self._system.admin)
                found |= tasks_of(name, answer.body.decode())
        return found


def tasks_of(name: str, metrics: str) -> dict[str, float]:
    """The tasks of a process' event loop, or of those of its workers, out of what it tells Prometheus."""
    found = {}
    for family in text_string_to_metric_families(metrics):
        if family.name == f"headrace_{name}_tasks":
            for sample in family.samples:
                worker = f" worker {sample.labels['worker']}" if "worker" in sample.labels else ""
                found[f"{name}{worker} tasks"] = sample.value
    return found


def usage_of(pid: int) -> dict[str, float]:
    """Resident memory in MB, descriptors and threads of a process; empty where it is gone."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found["memory MB"] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        found["descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        found["threads"] = len(os.listdir(f"/proc/{pid}/task"))
    return found


def _family(name: str, pid: int | None, below: Sequence[int]) -> list[tuple[str, int]]:
    if pid is None:
        return []
    return [(name, pid), *((f"{name} child {n}", child) for n, child in enumerate(below))]


def _size(folder: Path) -> float:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # compacted away meanwhile
            total += file.stat().st_size
    return total


def growth_figures(growth: Sequence[Growth]) -> dict[str, object]:
    """For the line of figures: each growth by its name, and how many of them grow."""
    told = {one.what: [round(one.mean, 3), round(one.per_hour, 3), round(one.error, 3)] for one in growth}
    return {"grows": sum(one.grows for one in growth), "growth": told}
