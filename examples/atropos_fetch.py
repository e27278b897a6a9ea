"""A trainer of Headrace's own kind, `fetch_batch`, fed by Atropos environments.

headrace serve --engine tiny --serve-channel train               # in another terminal; see docs/atropos.md
python examples/atropos_fetch.py [http://127.0.0.1:8100]       # and, beside it, examples/atropos_environment.py
"""

import sys

from headrace import connect

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
GROUPS = 2

with connect(address) as pool:
    for _ in range(GROUPS):
        batch = pool.fetch_batch(1, lease_s=60, timeout=60)  # the first lets environments in, and each is a step
        assert batch is not None, "no environment sent anything for a minute"
        for sequence in batch.sequences():  # tokens, loss_mask, log_probs, as of any agent's
            print(f"{len(sequence)} tokens, {int(sequence.loss_mask.sum())} of them sampled, reward {sequence.reward}")
        batch.ack()
