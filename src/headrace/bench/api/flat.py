"""`batch_flat`, `status_env_flat` and `minalloc_flat`: a long queue must cost no more than a short one.

Two servers stand side by side, one with a short queue and one with a long one. In every round each answers
`/status-env` and `/batch`, and gets as many groups again as it gave, so the queues keep their lengths.
"""

from __future__ import annotations

import asyncio
from itertools import count, islice
from pathlib import Path

from headrace.bench.api.client import Client, speaking
from headrace.bench.api.groups import Groups
from headrace.bench.api.servers import start_ours
from headrace.bench.api.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import median

WARM_UP = 3


def measure(sizes: Sizes, folder: Path) -> Part:
    part = Part({}, {})
    with start_ours(folder / "few") as few, start_ours(folder / "many") as many:
        addresses = few.address, many.address
        for share, length in ((None, sizes.many_groups), (sizes.share, sizes.many_shared_groups)):
            found = asyncio.run(_compare(sizes, addresses, (sizes.few_groups, length), share))
            name = "batch" if share is None else "shared_batch"
            for queue in found:
                part.absolute[f"{name}_ms_{queue.length}_queued"] = median(queue.batches[WARM_UP:]) * 1e3
            short, long = found
            part.ratios["batch_flat" if share is None else "minalloc_flat"] = _over(long.batches, short.batches)
            if share is None:
                part.ratios["status_env_flat"] = _over(long.statuses, short.statuses)
    return part


async def _compare(
    sizes: Sizes, addresses: tuple[str, str], lengths: tuple[int, int], share: float | None
) -> tuple[_Queue, _Queue]:
    groups = Groups(sizes.group_size, sizes.flat_tokens)
    async with speaking() as session:
        few, many = (
            _Queue(Client(session, address), groups, length) for address, length in zip(addresses, lengths, strict=True)
        )
        for queue in (few, many):
            await queue.open(sizes, share)
        for _ in range(WARM_UP + sizes.flat_rounds):
            for queue in (few, many):
                await queue.round()
    return few, many


class _Queue:
    """A server whose queue has the same length before and after every round."""

    def __init__(self, client: Client, groups: Groups, length: int) -> None:
        self.length = length
        self.batches: list[float] = []
        self.statuses: list[float] = []
        self._client = client
        self._groups = groups
        self._envs: list[int] = []
        self._numbers = count()

    async def open(self, sizes: Sizes, share: float | None) -> None:
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
    return median(many[WARM_UP:]) / median(few[WARM_UP:])
