"""The storm's real trainer: what `headrace train` runs, with a tiny model, on a channel of its own; killed at any time.

    python -m headrace.storm.learner POOL_ADDRESS FOLDER CHANNEL

A step is one group, and each step has its checkpoint: `learned_groups` tells from how many it has learned, over all of
its lives.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from headrace.storm.consumer import LEASE_S

if TYPE_CHECKING:
    from headrace.trainer.config import TrainerConfig

MODEL, RUN = "learner-model", "learner"
#: The smallest model that is one.
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
#: Seconds that it waits for a pool that is away: longer than any storm has patience.
PATIENCE_S = 86_400.0


def build_model(folder: Path, tokenizer: Path) -> None:
    """Writes the model that the learner begins with, for the tokenizer of a folder."""
    from transformers import AutoTokenizer

    from headrace.engine.tiny import write

    write(folder / MODEL, AutoTokenizer.from_pretrained(tokenizer), CONFIG, seed=0)


def learned_groups(folder: Path) -> int:
    """How many groups the newest checkpoint has learned from; 0 before there is one."""
    found = [orjson.loads(path.read_bytes()) for path in folder.glob(f"{RUN}/checkpoints/*/progress.json")]
    return max((int(progress["batches"]) for progress in found), default=0)


def config_of(address: str, folder: Path, channel: str) -> TrainerConfig:
    """A step a group, and a checkpoint a step; nothing is published."""
    from headrace.trainer.config import CheckpointConfig, PoolConfig, TrainerConfig

    return TrainerConfig(
        model=folder / MODEL,
        run=folder / RUN,
        steps=1_000_000,
        device="cpu",
        threads=1,
        pool=PoolConfig(address=address, channel=channel, batch_size=1, lease_s=LEASE_S, patience_s=PATIENCE_S),
        checkpoint=CheckpointConfig(every=1),
    )


def main(address: str, folder: str, channel: str) -> None:
    from headrace.trainer.checkpoint import Progress
    from headrace.trainer.reporting import RunWatcher
    from headrace.trainer.trainer import train

    class SaysReady(RunWatcher):
        def ready(self, progress: Progress) -> None:
            print(f"learner ready on {address}", flush=True)

    train(config_of(address, Path(folder), channel), resume=True, watcher=SaysReady())


if __name__ == "__main__":
    main(*sys.argv[1:])
