"""`ray_vs_embedded`: a gateway whose pool is a Ray actor against one whose pool is its own.

16 agents call the one and then the other, over the conversations of `passthrough`. The actor, which keeps its steps in
memory as the embedded pool does, lives in a local cluster that a child process starts and ends.
"""

from __future__ import annotations

from pathlib import Path

import ray

from headrace.bench.apart import apart
from headrace.bench.gateway.load import Load, Target
from headrace.bench.gateway.servers import ready, start_gateway, start_stub
from headrace.bench.gateway.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median
from headrace.pool.ray import start_pool, stop_pool

NAME, NAMESPACE = "bench_pool", "headrace-bench"


def measure(sizes: Sizes, folder: Path) -> Part:
    return apart(in_own_cluster, sizes, folder)


def in_own_cluster(sizes: Sizes, folder: Path) -> Part:
    started = ray.init(
        "local", namespace=NAMESPACE, num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    try:
        start_pool(NAME, namespace=NAMESPACE)
        try:
            return _measure(sizes, folder, started.address_info["gcs_address"])
        finally:
            stop_pool(NAME, namespace=NAMESPACE)
    finally:
        ray.shutdown()


def _measure(sizes: Sizes, folder: Path, cluster: str) -> Part:
    pool = ("--data-pool-name", NAME, "--ray-address", cluster, "--ray-namespace", NAMESPACE)
    lengths = ("--prompt-length", 4096, "--response-length", 1024)
    with (
        start_stub(folder, sizes) as stub,
        start_gateway(stub, folder, *pool, *lengths) as on_ray,
        start_gateway(stub, folder) as embedded,
        Load(sizes) as load,
    ):
        ready(on_ray, embedded)
        some = sizes.some_callers
        ray_rate, embedded_rate = map(
            median,
            in_turn(
                lambda: load.round(Target(on_ray.address), some, some * sizes.trajectories_a_caller).rate,
                lambda: load.round(Target(embedded.address), some, some * sizes.trajectories_a_caller).rate,
                sizes.ray_rounds,
            ),
        )
    return Part(
        {"ray_vs_embedded": ray_rate / embedded_rate},
        {"ray_req_s": ray_rate, "embedded_req_s": embedded_rate},
    )
