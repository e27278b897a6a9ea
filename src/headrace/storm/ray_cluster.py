"""A Ray cluster of two nodes on this machine, each for as long as its process lives.

    python -m headrace.storm.ray_cluster head
    python -m headrace.storm.ray_cluster node CLUSTER

The head stands for the machine that a cluster does not outlive: it is not killed. The node has room for the pool's
actor (`POOL_RESOURCE`); with its process the storm kills all that it started, as a machine that goes takes all with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import ray

from headrace.net.ray_placement import Placement
from headrace.pool.ray import actor_address, start_pool

NAME, NAMESPACE = "storm_pool", "storm"
POOL_RESOURCE = "storm_pool"
#: Where the node is: an address of this machine that is not the head's, so that nobody takes one for the other.
NODE_IP = "127.0.0.2"
STARTED = "Ray runtime started"
ENDING = {signal.SIGTERM, signal.SIGINT}


def place_pool(cluster: str, journal: Path, channels: dict[str, dict[str, object]]) -> str:
    """Starts the pool's actor on the node, which comes back there, or on the next one: its address."""
    start_pool(
        NAME,
        address=cluster,
        namespace=NAMESPACE,
        journal=journal,
        shared_journal=True,
        placement=Placement(resources={POOL_RESOURCE: 1.0}),
        channels=channels,
    )
    return actor_address(NAME, cluster, NAMESPACE)


def run_head() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    # "local": whatever else runs on this machine is not joined.
    started = ray.init("local", num_cpus=0, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    print(f"cluster ready on {started.address_info['gcs_address']}", flush=True)
    signal.sigwait(ENDING)
    ray.shutdown()


def run_node(cluster: str) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--address", cluster, "--node-ip-address", NODE_IP]
    command += ["--num-cpus", "0", "--resources", orjson.dumps({POOL_RESOURCE: 1}).decode()]
    # The head has made a token where there was none; `ray start` presents it where it is told to.
    asked = {"RAY_AUTH_MODE": "token"} | dict(os.environ)
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=asked)
    for number in ENDING:
        signal.signal(number, lambda *_: node.terminate())
    assert node.stdout is not None
    for line in node.stdout:
        print(line, end="", flush=True)
        if STARTED in line:
            print(f"node ready on {cluster}", flush=True)
    sys.exit(node.wait())


if __name__ == "__main__":
    if sys.argv[1] == "head":
        run_head()
    else:
        run_node(*sys.argv[2:])
