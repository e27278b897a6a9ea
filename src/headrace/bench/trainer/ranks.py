"""`ranks2_gap`: how far the weights of two ranks are from those of one process after ten steps on the same batches.

    python -m headrace.bench.trainer.ranks

prints one JSON line. Both train a small Llama in float32, on CPUs; the ranks have half of its weights each and talk
over gloo. What is left of a difference is float32 sums in another order, which AdamW divides by their own size.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.data.errors import HeadraceError
from headrace.data.sequence import Sequence, Span
from headrace.engine import tiny
from headrace.trainer.config import TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.ranks import ALONE, Ranks, joined

RANKS, STEPS, SEQUENCES = 2, 10, 12
SHORTEST, LONGEST, VOCABULARY = 16, 128, 300
#: Small enough that ten steps stay near each other; at a rate that learns, a difference of rounding grows by itself.
LEARNING_RATE = 1e-5
#: Seconds that the ranks may take: ten, on free cores.
ENDING_S = 900.0


def ranks2_gap() -> float:
    """The largest difference of a weight, over the largest weight of its matrix."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        folder = Path(scratch)
        model = folder / "model"
        tiny.build(model, 0)
        ours = _learned_together(folder)
        alone = _learned(folder, ALONE)
    return max(float((ours[name] - whole).abs().max() / whole.abs().max()) for name, whole in alone.items())


def _learned_together(folder: Path) -> dict[str, torch.Tensor]:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, folder), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(ENDING_S)
    if any(process.exitcode for process in ranks):
        raise HeadraceError(f"the ranks ended with {[process.exitcode for process in ranks]}; see above")
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return found


def _rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    weights = _learned(folder, joined())
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


def _learned(folder: Path, ranks: Ranks) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    optimizer: dict[str, Any] = {"lr": LEARNING_RATE, "tokens": 2 * LONGEST}
    config = TrainerConfig.model_validate({"model": folder / "model", "run": folder, "optimizer": optimizer})
    learner = Learner(config, ranks.placed("cpu"), ranks)
    for step in range(STEPS):
        learner.learn(_batch(step), step, step)
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def _batch(step: int) -> list[Sequence]:
    """Sequences of random lengths and advantages; the last half of each is trained on."""
    rng = np.random.default_rng(step)
    found = []
    for at in range(SEQUENCES):
        length = int(rng.integers(SHORTEST, LONGEST))
        mask = np.arange(length) >= length // 2
        span = Span(0, length // 2, length, 0.0, True, "stop", {}, 1.0)
        found.append(
            Sequence(
                tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                log_probs=np.where(mask, -5.8, 0).astype(np.float32),
                versions=np.where(mask, step, -1).astype(np.int32),
                trajectory_uid=f"t{at}",
                prompt_uid=f"p{at}",
                reward=0.0,
                spans=(span,),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
            )
        )
    return found


if __name__ == "__main__":
    print(json.dumps({"ranks2_gap": ranks2_gap()}))
