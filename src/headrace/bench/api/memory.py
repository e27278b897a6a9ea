"""`memory_vs_body`: what queued groups take in memory against what environments send, packed.

A server without a journal takes groups and nobody takes them away. The growth of its resident memory since its first
hundred groups is compared with the bytes of the same groups' bodies as environments compress them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.bench.api.client import Client, speaking
from headrace.bench.api.groups import DIFFERENT, Groups
from headrace.bench.api.sizes import Sizes
from headrace.bench.gateway.child import Child
from headrace.bench.report import Part

FIRST = 100
#: Bytes of a token, its label and its log-prob as arrays.
ARRAYS = 12


def measure(sizes: Sizes, folder: Path) -> Part:
    groups = Groups(sizes.group_size, sizes.tokens)
    with Child("headrace", "api", "--host", "127.0.0.1", "--port", 0) as server:
        grown = asyncio.run(_grown(sizes, server, groups))
    body = sizes.kept_groups * sum(len(groups.packed(n, 0)) for n in range(DIFFERENT)) / DIFFERENT
    tokens = sizes.kept_groups * sizes.group_size * sizes.tokens
    return Part(
        {"memory_vs_body": grown / body},
        {
            "memory_bytes_a_token": grown / tokens,
            "packed_body_bytes_a_token": body / tokens,
            "arrays_bytes_a_token": ARRAYS,
        },
    )


async def _grown(sizes: Sizes, server: Child, groups: Groups) -> int:
    async with speaking() as session:
        client = Client(session, server.address)
        envs = await client.open(sizes)
        await client.fill((groups.body(n, envs[n % len(envs)]) for n in range(FIRST)), at_once=10)
        before = server.memory()
        numbers = range(FIRST, FIRST + sizes.kept_groups)
        await client.fill((groups.body(n, envs[n % len(envs)]) for n in numbers), at_once=10)
        return server.memory() - before
