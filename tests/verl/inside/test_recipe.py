"""`examples/verl_recipe.py` on the CPU: verl's own workers, two under Ray with FSDP2 over gloo, learn from a pool.

What a GPU has beside it is not run here: NCCL, flash attention and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import verl_recipe
from kit import submit_group
from transformers import AutoModelForCausalLM

from headrace import connect
from headrace.data.errors import InvalidInput
from headrace.engine import tiny
from headrace.pool.ray import start_pool
from verl import DataProto

WORKERS = 2
#: The rewards of each group's members.
GROUPS = ([1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
SETTINGS = [
    "data.max_prompt_length=16",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.optim.lr=0.001",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    "algorithm.rollout_correction.rollout_is=token",
]


@pytest.fixture(scope="module")
def trainer() -> Iterator[verl_recipe.VerlTrainer]:
    given = verl_recipe.ray_environment()
    given["env_vars"]["OMP_NUM_THREADS"] = "1"
    ray.init("local", num_cpus=WORKERS + 1, namespace="default", include_dashboard=False, runtime_env=given)
    yield verl_recipe.VerlTrainer(verl_recipe.settings(str(tiny.folder()), SETTINGS), WORKERS)
    ray.shutdown()


@pytest.fixture
def pool(trainer: verl_recipe.VerlTrainer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A pool that is an actor of the same cluster, with two groups of four."""
    name = request.node.name
    handle = start_pool(name, attached=True, channels={"train": {"n_rollouts": 4}})
    found = connect(f"ray-actor://{name}?namespace=default")
    for at, rewards in enumerate(GROUPS):
        submit_group(found, f"g{at}", rewards, vocabulary=300)
    yield found
    ray.kill(handle)


def preferred(trainer: verl_recipe.VerlTrainer, data: DataProto) -> float:
    """How much likelier a token of the rewarded answers is than one of the others."""
    mask = data.batch["response_mask"]
    means = (trainer.log_probs(data) * mask).sum(-1) / mask.sum(-1)
    rewarded = data.batch["token_level_scores"].sum(-1) > 0
    return (means[rewarded].mean() - means[~rewarded].mean()).item()


def test_verls_workers_learn_from_the_pools_batches_and_each_is_acknowledged(
    trainer: verl_recipe.VerlTrainer, pool: Any, tmp_path: Path
) -> None:
    looked_at = pool.fetch_batch(2, lease_s=600)
    data = trainer.convert(looked_at)
    looked_at.nack()
    before = preferred(trainer, data)
    verl_recipe.train(pool, trainer, tmp_path, steps=1, groups=2)
    assert preferred(trainer, data) > before + 0.01
    stats = pool.stats("train")
    assert (stats["groups"]["ready"], stats["policy_version"]) == (0, 1)
    assert pool.fetch_batch(1, timeout=0) is None
    assert [folder.name for folder in tmp_path.iterdir()] == ["1"]


def test_a_checkpoint_gives_the_workers_their_weights_back(
    trainer: verl_recipe.VerlTrainer, pool: Any, tmp_path: Path
) -> None:
    data = trainer.convert(pool.fetch_batch(2, lease_s=600))
    trainer.save(tmp_path, 1)
    before = trainer.weights()
    trainer.learn(data)
    after = trainer.weights()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    trainer.load(tmp_path)
    found = trainer.weights()
    assert all(torch.equal(before[name], found[name]) for name in before)


def test_the_weights_that_are_handed_out_are_those_that_the_probe_was_computed_with(
    trainer: verl_recipe.VerlTrainer, pool: Any
) -> None:
    data = trainer.convert(pool.fetch_batch(2, lease_s=600))
    trainer.learn(data)
    probe = trainer.probe(data)
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(), dtype=torch.float32)
    model.load_state_dict(trainer.weights())
    ids = torch.tensor(probe.ids)
    with torch.no_grad():
        plain = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
    assert probe.log_probs == pytest.approx(plain.tolist(), abs=1e-4)


def test_a_batch_whose_step_fails_is_not_acknowledged(
    trainer: verl_recipe.VerlTrainer, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, step: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer, "save", full)
    with pytest.raises(OSError, match="no space left"):
        verl_recipe.train(pool, trainer, tmp_path, steps=1, groups=2)
    assert pool.stats("train")["groups"]["leased"] == 2


def test_trajectories_without_rewards_are_refused(trainer: verl_recipe.VerlTrainer, pool: Any) -> None:
    submit_group(pool, "unrewarded", [None] * 4, vocabulary=300)  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="has no reward"):
        trainer.convert(pool.fetch_batch(3, lease_s=600))
