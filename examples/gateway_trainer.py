"""The other end: a trainer that fetches what agents did, out of the pool that a gateway serves under its own address.

python examples/gateway_trainer.py [http://127.0.0.1:8100]     # after any of the agents in examples/gateway_*.py
"""

import sys

import httpx

from headrace import connect

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
version = httpx.get(f"{gateway}/policy_version").json()["version"]
with connect(gateway) as pool:
    while (batch := pool.fetch_batch(1, lease_s=60, timeout=1)) is not None:
        for sequence in batch.sequences():  # one a root-to-leaf path, every sampled token a target exactly once
            sampled = sequence.loss_mask
            print(
                f"{sequence.prompt_uid[:12]}: {len(sequence)} tokens, {int(sampled.sum())} of them sampled,",
                f"mean log-prob {sequence.log_probs[sampled].mean():.2f}, reward {sequence.reward}",
            )
        batch.ack()  # trained on: consumed for good
        version += 1
        httpx.post(f"{gateway}/policy_version", json={"version": version}).raise_for_status()
    print("policy version", version, "ledger", pool.stats()["ledger"])
