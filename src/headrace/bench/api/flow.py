"""`flow_*` and `cpu_per_group_*`: groups from environments to a trainer, as they are and gzip both ways.

Environments post over several connections while one trainer drains batches; a round ends when the trainer has read the
last one. The two servers take turns, round by round, with the same bodies. Every group must arrive exactly once.
"""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from headrace.bench.api.client import JSON, Client, speaking
from headrace.bench.api.groups import Groups
from headrace.bench.api.servers import original_python, start_original, start_ours
from headrace.bench.api.sizes import Sizes
from headrace.bench.gateway.child import Child
from headrace.bench.report import Part
from headrace.bench.timing import median

#: How long a trainer waits before it asks again.
POLL_S = 0.02
#: A group's first token, found without parsing the rest: the load must cost less than what it is put on.
_FIRST = re.compile(rb'"tokens": ?\[\[(\d+)')
ENCODINGS = {"": "identity", "_gzip": "gzip"}


@dataclass
class Side:
    child: Child
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in ENCODINGS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in ENCODINGS})


def measure(sizes: Sizes, folder: Path) -> Part:
    with ExitStack() as servers:
        sides = {"ours": Side(servers.enter_context(start_ours(folder / "journal")))}
        if (python := original_python()) is not None:
            sides["original"] = Side(servers.enter_context(start_original(python)))
        for side in sides.values():
            side.child.wait_until("/info")
        asyncio.run(_rounds(sizes, sides))
    return _part(sizes, sides)


async def _rounds(sizes: Sizes, sides: dict[str, Side]) -> None:
    groups = Groups(sizes.group_size, sizes.tokens)
    one_batch = sizes.batch_size // sizes.group_size
    async with speaking() as session:
        clients = {name: Client(session, side.child.address) for name, side in sides.items()}
        for kind in ENCODINGS:
            for name, side in sides.items():  # what is only loaded when it is first used
                await _flow(sizes, side.child, clients[name], groups, one_batch, kind)
            for _ in range(sizes.flow_rounds):
                for name, side in sides.items():
                    took, cpu = await _flow(sizes, side.child, clients[name], groups, sizes.flow_groups, kind)
                    side.seconds[kind].append(took)
                    side.cpu[kind].append(cpu / sizes.flow_groups)


async def _flow(
    sizes: Sizes, server: Child, client: Client, groups: Groups, count: int, kind: str
) -> tuple[float, float]:
    """Seconds from the first post to the last batch, and the server's of CPU."""
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


def _part(sizes: Sizes, sides: dict[str, Side]) -> Part:
    part = Part({}, {})
    for kind in ENCODINGS:
        for name, side in sides.items():
            part.absolute[f"flow{kind}_{name}_groups_s"] = sizes.flow_groups / median(side.seconds[kind])
            part.absolute[f"cpu{kind}_{name}_ms"] = median(side.cpu[kind]) * 1e3
        if "original" in sides:
            ours, theirs = sides["ours"], sides["original"]
            part.ratios[f"flow{kind}_vs_atropos"] = median(theirs.seconds[kind]) / median(ours.seconds[kind])
            part.ratios[f"cpu_per_group{kind}_vs_atropos"] = median(ours.cpu[kind]) / median(theirs.cpu[kind])
    return part
