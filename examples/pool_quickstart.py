"""The pool in ten lines: submit a step, fetch it back.

python examples/pool_quickstart.py                            # embedded, with a journal in runs/pool
python examples/pool_quickstart.py http://127.0.0.1:8200      # a `headrace pool serve`
python examples/pool_quickstart.py 'ray-actor://data_pool'    # a `headrace pool start`
"""

import sys
import uuid

from headrace import DataPool, Step, connect

pool = connect(sys.argv[1]) if len(sys.argv) > 1 else DataPool(journal="runs/pool")
uid = uuid.uuid4().hex  # what was consumed once is not handed out again: each run plays a new trajectory
step = Step(
    prompt_ids=[1, 2, 3],
    response_ids=[4, 5],
    rollout_log_probs=[-0.1, -0.2],
    trajectory_uid=f"t-{uid}",
    prompt_uid=f"p-{uid}",
    step_index=0,
    is_last=True,
    reward=1.0,
)
pool.submit_steps([step], channel="train")
batch = pool.fetch_batch(batch_size=1, n_rollouts=1, channel="train", timeout=5)
print(batch.steps[0].response_ids, pool.stats()["ledger"])
pool.close()
