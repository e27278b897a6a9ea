"""`ranks2_gap`: how far the weights of two ranks are from those of one process after ten steps on the same batches.

    python -m headrace.bench.trainer.ranks

prints one JSON line. Both train a small Llama in float32, on CPUs; the ranks have half of its weights each and talk
over gloo. What is left of a difference is float32 sums in another order, which AdamW divides by their own size.

    python -m headrace.bench.trainer.ranks --one-rank MODEL --device cuda --dtype bfloat16

tells what sharding itself costs: tokens/s on one rank, sharded, over those of the plain path.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
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

Figure = dict[str, float]

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
    """Sequences of random lengths and advantages."""
    rng = np.random.default_rng(step)
    return [_sequence(rng, at, int(rng.integers(SHORTEST, LONGEST)), step) for at in range(SEQUENCES)]


def _sequence(rng: np.random.Generator, at: int, length: int, version: int) -> Sequence:
    """A sequence whose last half is trained on."""
    mask = np.arange(length) >= length // 2
    return Sequence(
        tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        log_probs=np.where(mask, -5.8, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        trajectory_uid=f"t{at}",
        prompt_uid=f"p{at}",
        reward=0.0,
        spans=(Span(0, length // 2, length, 0.0, True, "stop", {}, 1.0),),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
    )


# -- what sharding costs -----------------------------------------------------------------------------------------------


def one_rank_vs_plain(model: Path, device: str, dtype: str, *, sequences: int, length: int, rounds: int) -> Figure:
    """Tokens/s of a learner whose model is sharded over one rank, of a plain one, and the former over the latter; on
    equal sequences, in turn."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    batch = _equal(sequences, length)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{scratch}/store", rank=0, world_size=1)
        rates = []
        for ranks in (ALONE, Ranks(mesh=init_device_mesh(device, (1,)))):
            config = TrainerConfig.model_validate(
                {"model": model, "run": scratch, "dtype": dtype, "optimizer": {"lr": 1e-6, "tokens": 8 * length}}
            )
            learner = Learner(config, device, ranks)
            times = []
            for step in range(rounds + 1):
                began = time.monotonic()
                learner.learn(batch, step, step)  # its metrics are read, so the device is done
                times.append(time.monotonic() - began)
            rates.append(sequences * length / float(np.median(times[1:])))
            del learner
            if device != "cpu":
                torch.cuda.empty_cache()
        dist.destroy_process_group()
    return {"plain_tokens_s": rates[0], "one_rank_tokens_s": rates[1], "one_rank_vs_plain": rates[1] / rates[0]}


def _equal(sequences: int, length: int) -> list[Sequence]:
    return [_sequence(np.random.default_rng(at), at, length, 0) for at in range(sequences)]


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--one-rank", type=Path, metavar="MODEL", help="measure what sharding over one rank costs")
    given.add_argument("--device", default="cpu")
    given.add_argument("--dtype", default="float32")
    given.add_argument("--sequences", type=int, default=32)
    given.add_argument("--length", type=int, default=3072)
    given.add_argument("--rounds", type=int, default=3)
    asked = given.parse_args()
    if asked.one_rank is None:
        print(json.dumps({"ranks2_gap": ranks2_gap()}))
        return
    sizes = {"sequences": asked.sequences, "length": asked.length, "rounds": asked.rounds}
    print(json.dumps(one_rank_vs_plain(asked.one_rank, asked.device, asked.dtype, **sizes)))


if __name__ == "__main__":
    main()
