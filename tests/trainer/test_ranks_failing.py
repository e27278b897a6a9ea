"""What goes wrong on one of several ranks: said once, by rank 0; and a rank that is killed costs no batch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer import ranked
from tests.trainer.kit import submit_group

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.engine import tiny
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.ranks import RankLost, joined

pytestmark = pytest.mark.system

GROUPS = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.5], [0.0, 1.0], [1.0, 0.0]]
#: What a rank ends with that says in a line that another is gone.
TOLD = 17


def config_of(model: Path, run: Path, **changes: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": model,
            "run": run,
            "steps": 4,
            "device": "cpu",
            "pool": {"batch_size": 2, "prefetch": False},
            "optimizer": {"lr": 1e-5},
            "checkpoint": {"every": 1},
            **changes,
        }
    )


def pool_in(folder: Path) -> DataPool:
    """A pool that outlives its process."""
    return DataPool(folder, channels={"train": {"n_rollouts": 2}}, durability="os")


def fill(pool: DataPool) -> None:
    for at, rewards in enumerate(GROUPS):
        submit_group(pool, f"g{at}", rewards, vocabulary=300)


# -- errors ------------------------------------------------------------------------------------------------------------


def fail(work: Callable[[], Any]) -> str:
    """How a rank says it: its error, or that it ends in silence."""
    try:
        work()
    except InvalidInput as error:
        return str(error)
    except SystemExit as ended:
        return f"silent, {ended.code}"
    return "no error"


def all_failures(model: Path, other: Path, folder: Path) -> list[str]:
    """What a rank says of each mistake, one after the other."""

    def with_config(config: TrainerConfig, *, resume: bool = False) -> Any:
        ranks = joined()
        pool = DataPool(channels={"train": {"n_rollouts": 2}}) if ranks.rank == 0 else None
        if pool is not None:
            fill(pool)
        return ranked.trained(ranks, config, pool, resume=resume)

    rank = joined().rank
    other_rate = config_of(model, folder / "a", optimizer={"lr": 1e-5 if rank == 0 else 1e-4})
    missing = config_of(model, folder / "b", steps=1)

    def unreadable() -> TrainerConfig:
        if rank:
            raise InvalidInput("there is no file train.yaml")
        return missing

    found = [
        fail(lambda: with_config(other_rate)),
        fail(lambda: joined().agreed(unreadable)),
        fail(lambda: with_config(config_of(model, folder / "c", device="cuda:1"))),
        fail(lambda: with_config(config_of(model, folder / "c", device="nonsense"))),
    ]
    with_config(config_of(model, folder / "d", steps=1))
    found.append(fail(lambda: with_config(config_of(model, folder / "d"))))
    found.append(fail(lambda: with_config(config_of(other, folder / "d"), resume=True)))
    return found


def test_a_mistake_is_said_once_by_rank_0_with_what_to_do(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.build(other, 0, hidden_size=64, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2)
    first, second = ranked.results(2, tmp_path / "ranks", all_failures, model, other, tmp_path)
    disagree, unread, gpu, nonsense, held, foreign = first
    assert "disagree on optimizer.lr: it is 1e-05 on rank 0 and 0.0001 on rank 1" in disagree
    assert unread == "rank 1: there is no file train.yaml"
    assert "device cuda:1 is one GPU, and there are 2 ranks" in gpu
    assert "device is 'nonsense'; it is auto, cpu, cuda" in nonsense
    assert "holds a run already; go on with --resume" in held
    assert "is a checkpoint of another model than" in foreign
    assert set(second) == {"silent, 1"}


def test_one_process_refuses_a_checkpoint_of_another_model_too(model: Path, tmp_path: Path) -> None:
    pool = DataPool(channels={"train": {"n_rollouts": 2}})
    fill(pool)
    Trainer(config_of(model, tmp_path / "run", steps=1), pool=pool).run()
    other = tmp_path / "other"
    tiny.build(other, 0, hidden_size=64, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2)
    with pytest.raises(InvalidInput, match="another model"):
        Trainer(config_of(other, tmp_path / "run"), resume=True, pool=pool)


# -- a rank that is killed ---------------------------------------------------------------------------------------------


def killed_at(step: int, victim: int, config: TrainerConfig, journal: Path) -> None:
    """A run in which a rank is killed in the middle of a step."""
    ranks = joined()
    backward = Learner._backward

    def dying(self: Learner, loss: Any, counts: bool) -> None:
        if ranks.rank == victim and self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        backward(self, loss, counts)

    learn = Learner.learn

    def noting(self: Learner, sequences: Any, step: int, version: int) -> dict[str, float]:
        self.step = step
        return learn(self, sequences, step, version)

    Learner.learn, Learner._backward = noting, dying  # type: ignore[method-assign]
    pool = pool_in(journal) if ranks.rank == 0 else None
    try:
        ranked.trained(ranks, config, pool)
    except RankLost:
        os._exit(TOLD)


@pytest.mark.parametrize("victim", [0, 1])
def test_where_a_rank_is_killed_the_others_end_and_the_run_goes_on_from_its_checkpoint(
    model: Path, tmp_path: Path, victim: int
) -> None:
    with pool_in(tmp_path / "whole") as pool:
        fill(pool)
        whole = Trainer(config_of(model, tmp_path / "whole-run"), pool=pool)
        whole.run()
    with pool_in(tmp_path / "journal") as pool:
        fill(pool)
    config = config_of(model, tmp_path / "run")
    codes = ranked.ended(ranked.start(2, tmp_path / "ranks", killed_at, 2, victim, config, tmp_path / "journal"))
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == TOLD
    with pool_in(tmp_path / "journal") as pool:
        again = Trainer(config, resume=True, pool=pool)
        assert again.progress.step == 2
        assert again.run().step == 4
        stats = pool.stats()
        assert stats["balanced"]
        assert stats["ledger"]["consumed"] == sum(map(len, GROUPS))
    for name, tensor in whole.learner.weights().items():
        assert float((again.learner.weights()[name] - tensor).abs().max() / tensor.abs().max()) < 1e-5, name
