"""The trainer's ranks as workers of a Ray cluster: stopped, killed and begun again, and exact to the batch."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.kit import pool_of, submit_group

from headrace import connect
from headrace.data.errors import InvalidInput
from headrace.pool.ray import actor_address, start_pool, stop_pool
from headrace.trainer import Trainer, TrainerConfig, ray_train
from headrace.trainer.config import TrainWorkers
from headrace.trainer.learner import Learner
from headrace.trainer.reporting import RunWatcher

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.system]

GROUPS = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.5], [0.0, 1.0], [1.0, 0.0]]


@pytest.fixture
def pool(ray_cluster: str) -> Iterator[str]:
    """The address of a pool with all groups, on the cluster."""
    name = f"pool-{uuid.uuid4().hex[:8]}"
    start_pool(name, channels={"train": {"n_rollouts": 2}})
    address = actor_address(name, ray_cluster)
    with connect(address) as made:
        for at, rewards in enumerate(GROUPS):
            submit_group(made, f"g{at}", rewards, vocabulary=300)
    yield address
    stop_pool(name)


class Stopping(RunWatcher):
    """Notes the steps, and sends this process a signal after the first."""

    def __init__(self, number: signal.Signals | None = None) -> None:
        super().__init__()
        self.steps: list[int] = []
        self._number = number

    def step(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])
        if self._number is not None:
            signal.raise_signal(self._number)
            self._number = None


def work_with_a_death(given: dict[str, Any]) -> None:
    """What workers do, and rank 1 dies once, in the middle of the third step."""
    mark = Path(given["config"]["run"]) / "died"
    learn = Learner.learn

    def dying(self: Learner, sequences: Any, step: int, version: int) -> dict[str, float]:
        if self.ranks.rank == 1 and step == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return learn(self, sequences, step, version)

    Learner.learn = dying  # type: ignore[method-assign]
    try:
        work(given)
    finally:
        Learner.learn = learn  # type: ignore[method-assign]


work = ray_train.work


@pytest.mark.long
def test_workers_stop_when_told_and_go_on_after_a_death_exact_to_the_batch(
    ray_cluster: str, pool: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(run: str, **changes: Any) -> TrainerConfig:
        fetching = {"batch_size": 2, "prefetch": False, **changes}
        given = {"model": model, "run": tmp_path / run, "steps": 4, "pool": fetching, "optimizer": {"lr": 1e-5}}
        return TrainerConfig.model_validate({**given, "device": "cpu", "checkpoint": {"every": 1}})

    whole = Trainer(config("whole"), pool=pool_of(GROUPS, vocabulary=300))
    whole.run()
    workers = TrainWorkers(workers=2, num_cpus=0.5, here=True, max_failures=1)
    where = {"address": ray_cluster, "namespace": "default"}
    first = Stopping(signal.SIGTERM)
    outcome = ray_train.train_on_ray(config("run", address=pool), workers, **where, resume=False, watcher=first)
    assert outcome.stopped_by == "SIGTERM"
    assert outcome.steps == len(first.steps) < 4
    with pytest.raises(InvalidInput, match="holds a run already"):
        ray_train.train_on_ray(config("run", address=pool), workers, **where, resume=False, watcher=first)
    monkeypatch.setattr(ray_train, "work", work_with_a_death)
    second = Stopping()
    outcome = ray_train.train_on_ray(config("run", address=pool), workers, **where, resume=True, watcher=second)
    assert (tmp_path / "run" / "died").exists()
    assert outcome.progress.step == 4
    with connect(pool) as seen:
        stats = seen.stats()
    assert stats["balanced"]
    assert stats["ledger"]["consumed"] == sum(map(len, GROUPS))
    trained = Trainer(config("run"), resume=True, pool=pool_of(GROUPS)).learner.weights()
    for name, tensor in whole.learner.weights().items():
        assert float((trained[name] - tensor).abs().max() / tensor.abs().max()) < 1e-5, name
