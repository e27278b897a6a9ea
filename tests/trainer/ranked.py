"""Several ranks on this machine: processes that train together over gloo.

They are forked from a server that has imported torch once, and find each other by a file.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from headrace import DataPool
from headrace.trainer import TrainerConfig
from headrace.trainer.ranks import Ranks

#: Seconds that ranks may take to end: importing torch takes one on a free core, and minutes on a busy one.
ENDING_S = 900.0
#: Tokens whose log-probs are compared.
PROBED = [5, 3, 8, 1, 13, 2]
#: What the server imports before it forks: all that ranks need.
PRELOADED = ["tests.trainer.ranked", "headrace.trainer.trainer", "torch.distributed.fsdp", "transformers"]


def start(count: int, folder: Path, target: Callable[..., Any], *given: Any) -> list[BaseProcess]:
    """Starts `target(ranks, *given)` as so many ranks; what it returns is kept in the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder.mkdir(parents=True)
    started = [
        context.Process(target=_begin, args=(rank, count, folder, target, given), daemon=True) for rank in range(count)
    ]
    for process in started:
        process.start()
    return started


def ended(processes: list[BaseProcess]) -> list[int]:
    """Waits for processes; their exit codes."""
    for process in processes:
        process.join(ENDING_S)
    return [process.exitcode if process.exitcode is not None else -1 for process in processes]


def results(count: int, folder: Path, target: Callable[..., Any], *given: Any) -> list[Any]:
    """What `target` returns on each of so many ranks, all of which must end well."""
    codes = ended(start(count, folder, target, *given))
    assert codes == [0] * count, (folder / "said").read_text()
    return [pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(count)]


def _begin(rank: int, count: int, folder: Path, target: Callable[..., Any], given: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    found = target(*given)
    (folder / f"found-{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def trained(
    ranks: Ranks, config: TrainerConfig, pool: DataPool | None, *, resume: bool = False
) -> tuple[Any, list[float]]:
    """One run on all ranks; rank 0's trainer, once it has ended, and the log-probs that servers are compared with."""
    from headrace.trainer import Trainer
    from headrace.trainer.shared_learner import follow

    with ranks:
        config = ranks.agreed(lambda: config)
        if ranks.rank:
            follow(config, "cpu", ranks)
            return None, []
        trainer = Trainer(config, resume=resume, pool=pool, ranks=ranks)
        trainer.run()
        return trainer, trainer.learner.raw_log_probs(PROBED)
