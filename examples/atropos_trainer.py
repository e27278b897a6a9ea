"""A trainer's loop as Atropos has it, fed by environments, and by agents behind the gateway where a channel is served.

headrace serve --engine tiny --serve-channel train               # in another terminal; see docs/atropos.md
python examples/atropos_trainer.py [http://127.0.0.1:8100]     # and, beside it, examples/gateway_openai_async.py
"""

import sys
import time

import httpx
import numpy as np

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
STEPS, BATCH_SIZE = 2, 4
run = {
    "wandb_group": "examples",
    "wandb_project": "headrace",
    "checkpoint_dir": "runs",
    "save_checkpoint_interval": 100,
}
run |= {"batch_size": BATCH_SIZE, "max_token_len": 4096, "starting_step": 0, "num_steps": STEPS}

with httpx.Client(base_url=address, timeout=60) as api:
    api.post("/register", json=run).raise_for_status()
    step, received = 0, {}
    while step < STEPS:
        answer = api.get("/batch", headers=received)
        batch = answer.json()["batch"]
        if batch is None:  # not enough yet
            time.sleep(0.1)
            continue
        received = {"Headrace-Received": answer.headers["Headrace-Batch"]}  # so that none comes twice
        losses = []
        for group in batch:
            scores = np.array(group["scores"])
            advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
            for labels, log_probs, advantage in zip(
                group["masks"], group["inference_logprobs"], advantages, strict=True
            ):
                sampled = np.array(labels) != -100  # the tokens to learn from
                losses.append(-advantage * np.array(log_probs)[sampled].sum())  # a real one: its own log-probs
        step += 1
        print(f"step {step}: {len(losses)} sequences in {len(batch)} groups, loss {np.mean(losses):.3f}", flush=True)
    print(api.get("/status").json())
