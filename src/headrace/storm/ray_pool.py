"""A Ray cluster of one node with the storm's pool as an actor, for as long as this process lives.

    python -m headrace.storm.ray_pool JOURNAL CHANNEL...

The actor's process is what the storm kills; Ray starts it again. This process stands for the machine: it is not killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import ray

from headrace.pool.ray import actor_address, start_pool

NAME, NAMESPACE = "storm_pool", "storm"


def main(journal: str, *channels: str) -> None:
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # "local": whatever else runs on this machine is not joined.
    started = ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE)
    address = started.address_info["gcs_address"]
    options = {channel: {"require_reward": True} for channel in channels}
    start_pool(NAME, address=address, namespace=NAMESPACE, journal=Path(journal), channels=options)
    print(f"pool ready on {actor_address(NAME, address, NAMESPACE)}", flush=True)
    signal.sigwait(signals)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
