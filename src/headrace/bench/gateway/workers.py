"""What a second worker costs: the CPU of a call with two workers over that with one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headrace.bench.gateway.load import GatewayLoad, GatewaySizes, LoadTarget
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.report import Figures
from headrace.bench.server_process import ServerProcess
from headrace.bench.timing import in_turn, median


def workers(sizes: GatewaySizes, folder: Path) -> Figures:
    """`workers2_cpu`: 16 agents hold the conversations of `passthrough` with a gateway of one process and with one of
    two workers, round by round. Their connections are shared, so a conversation's calls land in whichever worker; the
    pool is the parent's. All processes of a gateway count."""
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder, "--workers", 2) as two,
        start_gateway(stub, folder) as one,
        GatewayLoad(sizes) as load,
    ):
        ready(one, two)
        two_s, one_s = map(median, in_turn(partial(_cpu_s, load, two), partial(_cpu_s, load, one), sizes.worker_rounds))
    return Figures({"workers2_cpu": two_s / one_s}, {"workers1_cpu_ms": one_s * 1e3, "workers2_cpu_ms": two_s * 1e3})


def _cpu_s(load: GatewayLoad, gateway: ServerProcess) -> float:
    """CPU seconds of all the gateway's processes for each call."""
    some = load.sizes.some_callers
    meter = partial(gateway.cpu_s, children=True)
    found = load.round(LoadTarget(gateway.address), some, some * load.sizes.trajectories_a_caller, meter)
    return found.metered / len(found.latencies)
