"""What chat calls cost beside a bare proxy: the CPU of its process for a call over that of the gateway's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.gateway.load import BenchAgent, GatewayLoad, GatewaySizes, LoadTarget
from headrace.bench.gateway.servers import ready, start_gateway, start_proxy, start_stub
from headrace.bench.report import Figures
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import median


@dataclass(frozen=True, slots=True)
class CallCpu:
    """CPU seconds of a server's process for each call to the model: of the calls alone, and with what begins and ends
    their trajectories."""

    calls: float
    trajectories: float


def chat(sizes: GatewaySizes, folder: Path) -> Figures:
    """`chat_vs_passthrough` and `trajectory_vs_passthrough`, and the same of 20 turns (`chat20`, `trajectory20`).

    16 agents hold the conversations of `passthrough` with the proxy and with the gateway, round by round. All of them
    begin, then all of them call, then all of them complete, so that each can be measured by itself: the CPU of the
    process, in which the gateway's pool lives too. It does not depend on how busy the other core is, as calls a second
    do.
    """
    ratios: dict[str, float] = {}
    absolute: dict[str, float] = {}
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder) as gateway,
        start_proxy(stub) as proxy,
        GatewayLoad(sizes) as load,
    ):
        ready(gateway)
        for ending, turns in (("", sizes.turns), ("20", sizes.many_turns)):
            found: list[CallCpu] = []
            bare: list[CallCpu] = []
            for at in range(sizes.chat_rounds + 1):
                both = load.run(_cpu(load, gateway, turns)), load.run(_cpu(load, proxy, turns, trajectories=False))
                if at:  # the first round warms up
                    found.append(both[0])
                    bare.append(both[1])
            proxy_s = median([cpu.calls for cpu in bare])
            calls_s, trajectories_s = median([cpu.calls for cpu in found]), median([cpu.trajectories for cpu in found])
            ratios[f"chat{ending}_vs_passthrough"] = proxy_s / calls_s
            ratios[f"trajectory{ending}_vs_passthrough"] = proxy_s / trajectories_s
            absolute |= {
                f"chat{ending}_cpu_ms": calls_s * 1e3,
                f"trajectory{ending}_cpu_ms": trajectories_s * 1e3,
                f"proxy{ending}_cpu_ms": proxy_s * 1e3,
            }
    return Figures(ratios, absolute)


async def _cpu(load: GatewayLoad, server: ServerProcess, turns: int, *, trajectories: bool = True) -> CallCpu:
    sizes = load.sizes
    target = LoadTarget(server.address, trajectories=trajectories)
    agents = [BenchAgent(load, target) for _ in range(sizes.some_callers)]

    async def calls(agent: BenchAgent) -> None:
        for turn in range(turns):
            await agent.ask(sizes.more_words if turn else sizes.first_words)

    start = server.cpu_s()
    await asyncio.gather(*[agent.begin() for agent in agents])
    begun = server.cpu_s()
    await asyncio.gather(*[calls(agent) for agent in agents])
    called = server.cpu_s()
    await asyncio.gather(*[agent.end() for agent in agents])
    count = len(agents) * turns
    return CallCpu((called - begun) / count, (server.cpu_s() - start) / count)
