"""A trainer of Headrace's own kind, `fetch_batch`, fed by Atropos environments.

headrace serve --engine tiny --serve-channel train               # in another terminal; see docs/atropos.md
python examples/atropos_fetch.py [http://127.0.0.1:8100]       # and, beside it, examples/atropos_environment.py
"""

import sys

import httpx

from headrace import connect

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
GROUPS, BATCH_SIZE = 2, 8
run = {
    "wandb_group": "examples",
    "wandb_project": "headrace",
    "checkpoint_dir": "runs",
    "save_checkpoint_interval": 100,
}
run |= {"batch_size": BATCH_SIZE, "max_token_len": 4096, "starting_step": 0, "num_steps": 1}

# Environments wait until a trainer has registered and asked once; a later /batch would take what they have sent since.
if httpx.get(f"{address}/info").raise_for_status().json()["batch_size"] == -1:
    httpx.post(f"{address}/register", json=run).raise_for_status()
    httpx.get(f"{address}/batch").raise_for_status()

with connect(address) as pool:
    for _ in range(GROUPS):
        batch = pool.fetch_batch(1, lease_s=60, timeout=60)
        assert batch is not None, "no environment sent anything for a minute"
        for sequence in batch.sequences():  # tokens, loss_mask, log_probs, as of any agent's
            print(f"{len(sequence)} tokens, {int(sequence.loss_mask.sum())} of them sampled, reward {sequence.reward}")
        batch.ack()
