"""`vs_passthrough`, `added_p50_ms_vs_passthrough`, `req_s` and `cpu_ms`: the gateway against the bare proxy.

Four turns grow from 512 tokens to about 1,000, with 128 sampled ones each. 64 agents at once call the one and then the
other; a lone agent finds what a call takes when nothing stands in line. The proxy passes the agents' bodies on to the
stub's chat route. Then 16 agents, and the CPU that the gateway's process, in which the pool lives, takes for a call.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.gateway.load import Load, Target
from headrace.bench.gateway.servers import ready, start_gateway, start_proxy, start_stub
from headrace.bench.gateway.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median


def measure(sizes: Sizes, folder: Path) -> Part:
    with start_stub(folder, sizes) as stub, start_gateway(stub, folder) as gateway, start_proxy(stub) as proxy:
        ready(gateway)
        through, bare = Target(gateway.address), Target(proxy.address, trajectories=False)
        with Load(sizes) as load:
            many = sizes.many_callers
            gateway_rate, proxy_rate = map(
                median,
                in_turn(
                    lambda: load.round(through, many, many * sizes.trajectories_a_caller).rate,
                    lambda: load.round(bare, many, many * sizes.trajectories_a_caller).rate,
                    sizes.throughput_rounds,
                ),
            )
            gateway_p50, proxy_p50 = map(
                median,
                in_turn(
                    lambda: load.round(through, 1, sizes.lone_trajectories).p50,
                    lambda: load.round(bare, 1, sizes.lone_trajectories).p50,
                    sizes.lone_rounds,
                ),
            )
            rates, cpu = [], []
            some = sizes.some_callers
            for _ in range(sizes.throughput_rounds):
                before = gateway.cpu_s()
                found = load.round(through, some, some * sizes.trajectories_a_caller)
                rates.append(found.rate)
                cpu.append((gateway.cpu_s() - before) / len(found.latencies))
    return Part(
        {
            "vs_passthrough": gateway_rate / proxy_rate,
            "added_p50_ms_vs_passthrough": (gateway_p50 - proxy_p50) * 1e3,
            "req_s": median(rates),
            "cpu_ms": median(cpu) * 1e3,
        },
        {
            f"req_s_{many}_callers": gateway_rate,
            f"proxy_req_s_{many}_callers": proxy_rate,
            "p50_ms": gateway_p50 * 1e3,
            "proxy_p50_ms": proxy_p50 * 1e3,
        },
    )
