"""What `headrace bench api` measures, part by part, and the bars that the figures are held against."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path

from rich.console import Console

from headrace.bench.api.load import (
    DIFFERENT_GROUPS,
    FULL,
    JSON,
    ORIGINAL_ABSENT,
    QUICK,
    ApiSizes,
    BenchApiClient,
    GroupBodies,
    open_session,
    original_python,
    start_original,
    start_ours,
)
from headrace.bench.report import Bar, BenchReport, Figures, measure_parts
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import median

#: What cannot be said without the original.
RATIOS = {
    "flow_vs_atropos": Bar(
        "groups/s from 4 environments to a trainer over the original's: 8 sequences of 1,024 tokens, batches of 128",
        at_least=10,
    ),
    "flow_gzip_vs_atropos": Bar("the same with gzip both ways", at_least=10),
    "cpu_per_group_vs_atropos": Bar("CPU of a group, journal on, over the original's", at_most=0.1),
    "cpu_per_group_gzip_vs_atropos": Bar("the same with gzip both ways", at_most=0.1),
}
BARS = {
    "batch_flat": Bar("/batch at 20,000 queued groups over 1,000", at_most=1.5),
    "status_env_flat": Bar("/status-env at 20,000 queued groups over 1,000", at_most=1.5),
    "memory_vs_body": Bar("growth of memory over the bytes of the queued groups' gzip bodies", at_most=1.5),
    "minalloc_flat": Bar("/batch with a share for every environment at 8,000 queued groups over 1,000", at_most=1.5),
}


def measure(quick: bool = False) -> BenchReport:
    """All figures of the Trajectory API; with `quick` at smaller sizes."""
    return measure_sizes(QUICK if quick else FULL)


def measure_sizes(sizes: ApiSizes, base: Path | None = None) -> BenchReport:
    """Measures every part in turn, each in a folder below `base`."""
    bars = RATIOS | BARS
    details: dict[str, object] = {"sizes": asdict(sizes), "original": "atroposlib"}
    if original_python() is None:
        Console(stderr=True).print(ORIGINAL_ABSENT)
        bars = BARS
        details["original"] = "not installed"
    report = BenchReport(f"headrace bench api ({sizes.name})", bars, details=details)
    return measure_parts(report, PARTS, sizes, base)


#: How long a trainer waits before it asks again.
POLL_S = 0.02
#: A group's first token, found without parsing the rest: the load must cost less than what it is put on.
_FIRST = re.compile(rb'"tokens": ?\[\[(\d+)')
ENCODINGS = {"": "identity", "_gzip": "gzip"}


@dataclass
class FlowSide:
    """A server, and the times of its rounds by encoding: seconds, and CPU seconds for each group."""

    child: ServerProcess
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in ENCODINGS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in ENCODINGS})


def flow(sizes: ApiSizes, folder: Path) -> Figures:
    """`flow_*` and `cpu_per_group_*`: groups from environments to a trainer, as they are and gzip both ways.

    Environments post over several connections while one trainer drains batches; a round ends when the trainer has read
    the last one. The two servers take turns, round by round, with the same bodies. Every group must arrive exactly
    once.
    """
    with ExitStack() as servers:
        sides = {"ours": FlowSide(servers.enter_context(start_ours(folder / "journal")))}
        if (python := original_python()) is not None:
            sides["original"] = FlowSide(servers.enter_context(start_original(python)))
        for side in sides.values():
            side.child.wait_until("/info")
        asyncio.run(_rounds(sizes, sides))
    return _part(sizes, sides)


async def _rounds(sizes: ApiSizes, sides: dict[str, FlowSide]) -> None:
    groups = GroupBodies(sizes.group_size, sizes.tokens)
    one_batch = sizes.batch_size // sizes.group_size
    async with open_session() as session:
        clients = {name: BenchApiClient(session, side.child.address) for name, side in sides.items()}
        for kind in ENCODINGS:
            for name, side in sides.items():  # what is only loaded when it is first used
                await _flow(sizes, side.child, clients[name], groups, one_batch, kind)
            for _ in range(sizes.flow_rounds):
                for name, side in sides.items():
                    took, cpu = await _flow(sizes, side.child, clients[name], groups, sizes.flow_groups, kind)
                    side.seconds[kind].append(took)
                    side.cpu[kind].append(cpu / sizes.flow_groups)


async def _flow(
    sizes: ApiSizes, server: ServerProcess, client: BenchApiClient, groups: GroupBodies, count: int, kind: str
) -> tuple[float, float]:
    """Seconds from the first post to the last batch, and the server's CPU seconds."""
    envs = await client.open(sizes)
    write = groups.packed if kind else groups.body
    bodies = [write(number, envs[number % len(envs)]) for number in range(count)]
    headers = JSON | ({"content-encoding": "gzip"} if kind else {})
    left = iter(bodies)
    arrived: list[int] = []

    async def post() -> None:
        for body in left:
            await client.call("POST", "/scored_data", data=body, headers=headers)

    async def train() -> None:
        while len(arrived) < count:
            found = _FIRST.findall(await client.call("GET", "/batch", headers={"accept-encoding": ENCODINGS[kind]}))
            arrived.extend(map(int, found))
            if not found:
                await asyncio.sleep(POLL_S)

    begun, before = time.perf_counter(), server.cpu_s()
    await asyncio.gather(train(), *(post() for _ in range(sizes.connections)))
    took, cpu = time.perf_counter() - begun, server.cpu_s() - before
    if sorted(arrived) != list(range(count)):
        raise RuntimeError(f"{len(arrived)} groups arrived, {len(set(arrived))} different ones; {count} were posted")
    return took, cpu


def _part(sizes: ApiSizes, sides: dict[str, FlowSide]) -> Figures:
    part = Figures({}, {})
    for kind in ENCODINGS:
        for name, side in sides.items():
            part.absolute[f"flow{kind}_{name}_groups_s"] = sizes.flow_groups / median(side.seconds[kind])
            part.absolute[f"cpu{kind}_{name}_ms"] = median(side.cpu[kind]) * 1e3
        if "original" in sides:
            ours, theirs = sides["ours"], sides["original"]
            part.ratios[f"flow{kind}_vs_atropos"] = median(theirs.seconds[kind]) / median(ours.seconds[kind])
            part.ratios[f"cpu_per_group{kind}_vs_atropos"] = median(ours.cpu[kind]) / median(theirs.cpu[kind])
    return part


FLAT_WARM_UP_ROUNDS = 3


def flat(sizes: ApiSizes, folder: Path) -> Figures:
    """`batch_flat`, `status_env_flat` and `minalloc_flat`: a long queue must cost no more than a short one.

    Two servers stand side by side, one with a short queue and one with a long one. In every round each answers
    `/status-env` and `/batch`, and gets as many groups again as it gave, so the queues keep their lengths.
    """
    part = Figures({}, {})
    with start_ours(folder / "few") as few, start_ours(folder / "many") as many:
        addresses = few.address, many.address
        for share, length in ((None, sizes.many_groups), (sizes.share, sizes.many_shared_groups)):
            found = asyncio.run(_compare(sizes, addresses, (sizes.few_groups, length), share))
            name = "batch" if share is None else "shared_batch"
            for queue in found:
                part.absolute[f"{name}_ms_{queue.length}_queued"] = median(queue.batches[FLAT_WARM_UP_ROUNDS:]) * 1e3
            short, long = found
            part.ratios["batch_flat" if share is None else "minalloc_flat"] = _over(long.batches, short.batches)
            if share is None:
                part.ratios["status_env_flat"] = _over(long.statuses, short.statuses)
    return part


async def _compare(
    sizes: ApiSizes, addresses: tuple[str, str], lengths: tuple[int, int], share: float | None
) -> tuple[_Queue, _Queue]:
    groups = GroupBodies(sizes.group_size, sizes.flat_tokens)
    async with open_session() as session:
        few, many = (
            _Queue(BenchApiClient(session, address), groups, length)
            for address, length in zip(addresses, lengths, strict=True)
        )
        for queue in (few, many):
            await queue.open(sizes, share)
        for _ in range(FLAT_WARM_UP_ROUNDS + sizes.flat_rounds):
            for queue in (few, many):
                await queue.round()
    return few, many


class _Queue:
    """A server whose queue has the same length before and after every round."""

    def __init__(self, client: BenchApiClient, groups: GroupBodies, length: int) -> None:
        self.length = length
        self.batches: list[float] = []
        self.statuses: list[float] = []
        self._client = client
        self._groups = groups
        self._envs: list[int] = []
        self._numbers = count()

    async def open(self, sizes: ApiSizes, share: float | None) -> None:
        self._envs = await self._client.open(sizes, share=share)
        await self._post(self.length)

    async def round(self) -> None:
        await self._client.call("GET", "/status-env", json={"env_id": self._envs[0]})
        self.statuses.append(self._client.took)
        found = await self._client.ask("GET", "/batch")
        self.batches.append(self._client.took)
        await self._post(len(found["batch"]))

    async def _post(self, many: int) -> None:
        numbers = islice(self._numbers, many)
        await self._client.fill(self._groups.body(n, self._envs[n % len(self._envs)]) for n in numbers)


def _over(many: list[float], few: list[float]) -> float:
    return median(many[FLAT_WARM_UP_ROUNDS:]) / median(few[FLAT_WARM_UP_ROUNDS:])


UNCOUNTED_GROUPS = 100
#: Bytes of a token, its label and its log-prob as arrays.
ARRAY_BYTES_A_TOKEN = 12


def memory(sizes: ApiSizes, folder: Path) -> Figures:
    """`memory_vs_body`: what queued groups take in memory against what environments send, packed.

    A server without a journal takes groups and nobody takes them away. The growth of its resident memory since its
    first hundred groups is compared with the bytes of the same groups' bodies as environments compress them.
    """
    groups = GroupBodies(sizes.group_size, sizes.tokens)
    with ServerProcess("headrace", "api", "--host", "127.0.0.1", "--port", 0) as server:
        grown = asyncio.run(_grown(sizes, server, groups))
    body = sizes.kept_groups * sum(len(groups.packed(n, 0)) for n in range(DIFFERENT_GROUPS)) / DIFFERENT_GROUPS
    tokens = sizes.kept_groups * sizes.group_size * sizes.tokens
    return Figures(
        {"memory_vs_body": grown / body},
        {
            "memory_bytes_a_token": grown / tokens,
            "packed_body_bytes_a_token": body / tokens,
            "arrays_bytes_a_token": ARRAY_BYTES_A_TOKEN,
        },
    )


async def _grown(sizes: ApiSizes, server: ServerProcess, groups: GroupBodies) -> int:
    async with open_session() as session:
        client = BenchApiClient(session, server.address)
        envs = await client.open(sizes)
        await client.fill((groups.body(n, envs[n % len(envs)]) for n in range(UNCOUNTED_GROUPS)), at_once=10)
        before = server.memory()
        numbers = range(UNCOUNTED_GROUPS, UNCOUNTED_GROUPS + sizes.kept_groups)
        await client.fill((groups.body(n, envs[n % len(envs)]) for n in numbers), at_once=10)
        return server.memory() - before


#: The parts by the names that a run tells, in its order.
PARTS = {"flow": flow, "flat": flat, "memory": memory}
