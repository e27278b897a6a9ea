"""A trainer for environments: the two calls at the Trajectory API that let environments in, and then `headrace train`.

python examples/env_trainer.py examples/env_number.yaml [--resume]     # what `headrace train` takes (docs/trainer.md)

The file's pool is a server that was started with `--serve-channel train`: there, what environments send is what a
trainer fetches.
"""

import os
import sys
from pathlib import Path

import httpx

from headrace.trainer.config import load

config = load(Path(sys.argv[1]))
about = {
    "wandb_group": "examples",
    "wandb_project": "headrace",
    "batch_size": config.pool.batch_size * (config.pool.n_rollouts or 1),  # in sequences, not in groups
    "max_token_len": config.max_length or 4096,
    "checkpoint_dir": str(config.run),
    "save_checkpoint_interval": config.checkpoint.every,
    "starting_step": 0,
    "num_steps": config.steps,
}
patience = httpx.HTTPTransport(retries=8)  # connections, with longer and longer waits: a server that just starts
with httpx.Client(base_url=config.pool.address, timeout=60, transport=patience) as api:
    api.post("/register", json=about).raise_for_status()
    api.get("/batch").raise_for_status()  # environments begin with a trainer's first question

os.execv(sys.executable, [sys.executable, "-m", "headrace", "train", *sys.argv[1:]])
