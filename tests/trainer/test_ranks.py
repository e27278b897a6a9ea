"""Several ranks train one model: what they compute is what one process computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer import ranked
from tests.trainer.kit import pool_of, sequence

from headrace.data.errors import InvalidInput
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.memory import MemoryLimits
from headrace.trainer.ranks import Ranks, deal, joined, sequence_cost
from headrace.trainer.shared_learner import Follower, SharedLearner

pytestmark = pytest.mark.system

#: Rewards of the groups: ten batches of two.
GROUPS = [[float(at % 3), 1.0, 0.0, float(at % 5) / 2] for at in range(20)]
STEPS = 10
#: Largest difference of a number after ten steps, of the largest of its kind: float32 sums in another order.
ROUNDING = 1e-5

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"optimizer": {"minibatches": 2}},
    "everything": {
        "algorithm": {"advantage": "gae", "old": "proximal", "kl": 0.1, "entropy": 0.01},
        "critic": {"lr": 1e-5},
    },
}


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Callable[..., TrainerConfig]:
    def made(run: str, variant: str = "grpo", **changes: Any) -> TrainerConfig:
        given = {**VARIANTS[variant], **changes}
        given["optimizer"] = {"lr": 1e-5, "tokens": 64, **given.get("optimizer", {})}
        return TrainerConfig.model_validate(
            {
                "model": model,
                "run": tmp_path / run,
                "steps": STEPS,
                "device": "cpu",
                "pool": {"batch_size": 2, "prefetch": False},
                "checkpoint": {"every": 5},
                **given,
            }
        )

    return made


Config = Callable[..., TrainerConfig]
Result = dict[str, Any]


def batches(skipped: int = 0) -> Any:
    """A pool of all groups; of those after so many batches, for a run that goes on."""
    pool = pool_of(GROUPS, vocabulary=300, turns=2)
    for _ in range(skipped):
        assert pool.fetch_batch(2) is not None
    return pool


def result(trainer: Any, pool: Any, probe: list[float]) -> Result:
    """What a run came to."""
    return {"rows": rows_of(trainer.config.run), "ledger": dict(pool.stats()["ledger"]), "probe": probe}


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_all(runs: list[tuple[TrainerConfig, int, bool]]) -> list[Result | None]:
    """What a rank does: one run after the other."""
    found: list[Result | None] = []
    for config, skipped, resume in runs:
        ranks = joined()
        pool = batches(skipped) if ranks.rank == 0 else None
        trainer, probe = ranked.trained(ranks, config, pool, resume=resume)
        found.append(None if trainer is None else result(trainer, pool, probe))
    return found


def alone(config: TrainerConfig, skipped: int = 0, *, resume: bool = False) -> Result:
    pool = batches(skipped)
    trainer = Trainer(config, resume=resume, pool=pool)
    trainer.run()
    return result(trainer, pool, trainer.learner.raw_log_probs(ranked.PROBED))


def weights_in(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(sorted((run / "checkpoints").iterdir())[-1] / "model.safetensors")


def assert_same_run(one: Path, other: Path, first: Result, second: Result) -> None:
    for mine, theirs in zip(first["rows"], second["rows"], strict=True):
        for name in ("loss", "entropy", "kl", "grad_norm", "ratio_max", "ratio_min", "clip_fraction"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (mine["step"], name)
    assert first["probe"] == pytest.approx(second["probe"], rel=1e-5)
    assert gap(one, other) < ROUNDING


def gap(one: Path, other: Path) -> float:
    mine, theirs = weights_in(one), weights_in(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in mine)


def check_runs(count: int, config: Config, folder: Path, variants: list[str]) -> None:
    """So many ranks make the runs of one process, and go on with each other's checkpoints."""
    whole = {variant: alone(config(f"whole-{variant}", variant)) for variant in variants}
    alone(config("begun", steps=5))
    found = ranked.results(
        *(count, folder / "ranks", run_all),
        [
            *((config(f"ranked-{variant}", variant), 0, False) for variant in variants),
            (config("halved", variants[-1], steps=5), 0, False),
            (config("begun"), 5, True),
            (config("bfloat16", variants[-1], steps=1, dtype="bfloat16"), 0, False),
        ],
    )[0]
    for variant, came in zip(variants, found, strict=False):
        assert_same_run(folder / f"whole-{variant}", folder / f"ranked-{variant}", whole[variant], came)
        assert came["ledger"] == whole[variant]["ledger"]
    rounded, exact = found[-1]["rows"][0], whole[variants[-1]]["rows"][0]
    assert rounded["entropy"] == pytest.approx(exact["entropy"], rel=0.01)
    assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)
    assert gap(folder / "begun", folder / "whole-grpo") < ROUNDING
    alone(config("halved", variants[-1]), 5, resume=True)
    assert gap(folder / "halved", folder / f"whole-{variants[-1]}") < ROUNDING


@pytest.mark.long
def test_four_ranks_compute_what_one_does(config: Config, tmp_path: Path) -> None:
    check_runs(4, config, tmp_path, ["grpo", "everything"])
    # Half of them go on with what all had written.
    ranked.results(4, tmp_path / "four", run_all, [(config("fewer", steps=5), 0, False)])
    ranked.results(2, tmp_path / "two", run_all, [(config("fewer"), 5, True)])
    assert gap(tmp_path / "fewer", tmp_path / "whole-grpo") < ROUNDING


def test_two_ranks_compute_what_one_does_and_each_goes_on_where_the_other_ended(config: Config, tmp_path: Path) -> None:
    check_runs(2, config, tmp_path, ["grpo", "everything"])


def fitted(config: TrainerConfig) -> tuple[int, int, int]:
    """What a rank on a GPU of its own fits into memory, of which rank 0 has most: the tokens of the longest pass,
    beyond how many its layers are recomputed, and into how many passes it cuts a batch."""
    ranks = joined()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.trainer.learner.available_bytes", lambda device: (4 - ranks.rank) << 20)
        patch.setattr(MemoryLimits, "pass_tokens", lambda limits, wanted, device: min(wanted, limits.longest))
        learner = SharedLearner(config, "cpu", ranks) if ranks.rank == 0 else Follower(config, "cpu", ranks)._learner
    beyond = learner.policy.decoder.recompute_beyond
    assert beyond is not None
    batch = [sequence(((2, 40),), uid=f"t{at}", seed=at, vocabulary=300) for at in range(100)]
    return learner.limits.longest, beyond, len(list(learner._passes(batch)))


def test_ranks_with_unequal_memory_cut_a_batch_into_the_passes_that_fit_all(config: Config, tmp_path: Path) -> None:
    most, least = ranked.results(2, tmp_path / "ranks", fitted, config("fitted", optimizer={"tokens": 10**6}))
    assert most == least


def test_shares_are_balanced_by_cost_and_complete() -> None:
    costs = [sequence_cost(length, 32) for length in (900, 10, 20, 500, 30, 450, 70, 5)]
    shares = deal(costs, range(8), 3)
    assert sorted(at for share in shares for at in share) == list(range(8))
    loads = [sum(costs[at] for at in share) for share in shares]
    assert max(loads) == costs[0]  # nothing can be cheaper than the dearest
    assert min(loads) > 0
    assert deal(costs, range(8), 1) == [list(range(8))]
    assert deal(costs[:1], range(1), 2) == [[0], []]


def test_a_group_stays_on_one_rank_where_that_is_fair() -> None:
    assert deal([5.0] * 8, [0, 1, 0, 1, 0, 1, 0, 1], 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(map(len, deal([5.0] * 8, [0] * 8, 2))) == [4, 4]  # it would not be fair


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {"rank": 4}}, r"lora is set.*leave out --workers or lora"),
        ({"memory": {"offload": "optimizer"}}, r"memory\.offload is optimizer.*set none"),
        ({"compile": "on"}, r"compile is on.*set auto or off"),
    ],
)
def test_what_one_rank_alone_can_is_refused_before_a_model_is_loaded(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    config = TrainerConfig.model_validate({"model": tmp_path / "none", "run": tmp_path / "run", **changes})
    with pytest.raises(InvalidInput, match=said):
        Learner(config, "cpu", Ranks(rank=0, count=2))
