"""`stream_vs_direct`: how long an agent waits for the first token, through the gateway and from the rollout server.

The rollout server takes 20 ms until its first token and sends the rest at once. A lone agent streams four turns from
the stub's own chat route, and then through the gateway. The gateway is granted 2 ms, whatever the server takes.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.gateway.load import Agent, Load, Target
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.gateway.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median

GRANTED_S = 0.002


def measure(sizes: Sizes, folder: Path) -> Part:
    with (
        start_stub(folder, sizes, first_token_ms=sizes.first_token_ms) as stub,
        start_gateway(stub, folder) as gateway,
        Load(sizes) as load,
    ):
        ready(gateway)
        through, direct = Target(gateway.address), Target(stub.address, trajectories=False)
        gateway_s, direct_s = map(
            median,
            in_turn(
                lambda: load.run(_first_token(load, through)),
                lambda: load.run(_first_token(load, direct)),
                sizes.stream_rounds,
            ),
        )
    return Part(
        {"stream_vs_direct": (gateway_s - GRANTED_S) / direct_s},
        {"first_token_ms": gateway_s * 1e3, "first_token_ms_direct": direct_s * 1e3},
    )


async def _first_token(load: Load, target: Target) -> float:
    """The median of the seconds until a call's first text."""
    sizes = load.sizes
    seconds = []
    for _ in range(sizes.streams):
        agent = Agent(load, target)
        await agent.begin()
        for turn in range(sizes.turns):
            seconds.append(await agent.ask_streamed(sizes.more_words if turn else sizes.first_words))
        await agent.end()
    return median(seconds)
