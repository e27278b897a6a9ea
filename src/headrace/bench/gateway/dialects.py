"""`responses_vs_chat` and `messages_vs_chat`: what a call costs the gateway in another dialect.

The same conversations as everywhere, held by 16 agents in chat completions and then in the other dialect, on one
gateway, round by round. What is measured is the CPU of the gateway's process for a call, the pool included.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headrace.bench.gateway.child import Child
from headrace.bench.gateway.load import Load, Target
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.gateway.sizes import Sizes
from headrace.bench.gateway.wire import Chat, Messages, Responses, Wire
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median


def measure(sizes: Sizes, folder: Path) -> Part:
    wires: dict[str, Wire] = {"responses": Responses(), "messages": Messages()}
    ratios: dict[str, float] = {}
    absolute: dict[str, float] = {}
    with start_stub(folder, sizes) as stub, start_gateway(stub, folder) as gateway, Load(sizes) as load:
        ready(gateway)
        for name, wire in wires.items():
            other_s, chat_s = map(
                median,
                in_turn(
                    partial(_cpu_s, load, gateway, wire),
                    partial(_cpu_s, load, gateway, Chat()),
                    sizes.throughput_rounds,
                ),
            )
            ratios[f"{name}_vs_chat"] = other_s / chat_s
            absolute |= {f"{name}_cpu_ms": other_s * 1e3, f"{name}_cpu_ms_chat": chat_s * 1e3}
    return Part(ratios, absolute)


def _cpu_s(load: Load, gateway: Child, wire: Wire) -> float:
    """Seconds of CPU for a call."""
    some = load.sizes.some_callers
    before = gateway.cpu_s()
    found = load.round(Target(gateway.address, wire=wire), some, some * load.sizes.trajectories_a_caller)
    return (gateway.cpu_s() - before) / len(found.latencies)
