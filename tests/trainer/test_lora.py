"""LoRA: only adapters learn, they are what is kept, and without them the model is where it began."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.trainer.kit import pool_of, sequence

from headrace import Sequence
from headrace.data.errors import InvalidInput
from headrace.engine import tiny
from headrace.extras import MissingExtra
from headrace.run.config import TrainSection
from headrace.trainer.config import LoraConfig, TrainerConfig
from headrace.trainer.learner import Learner
from headrace.trainer.lora import WithoutAdapter
from headrace.trainer.trainer import Trainer

LORA = {"rank": 4, "lr": 1e-2}


def learner(model: Path, lora: dict[str, Any] | None = None, **changes: Any) -> Learner:
    return Learner(TrainerConfig(model=model, run=model, lora=lora or LORA, **changes), "cpu")


def several(count: int = 4) -> list[Sequence]:
    made = [sequence([(2, 5), (7, 11)], advantage=(-1.0) ** at, seed=at, vocabulary=300) for at in range(count)]
    return [replace(one, log_probs=np.where(one.loss_mask, -5.9, 0).astype(np.float32)) for one in made]


def trained(model: Path, **changes: Any) -> Learner:
    found = learner(model, **changes)
    for step in range(3):
        found.learn(several(), step, step)
    return found


def base(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    given = torch.tensor(ids)
    with torch.no_grad():
        every = model(given[None]).logits[0, :-1].log_softmax(-1)
    return every.gather(-1, given[1:, None])[:, 0]


IDS = list(range(5, 40, 2))
#: Half of the vocabulary has ids below it.
SMALL = 180


def test_only_the_adapters_learn_and_they_begin_as_nothing(model: Path) -> None:
    found = learner(model)
    policy, theirs = found.policy, base(model)
    assert torch.allclose(torch.tensor(policy.raw_log_probs(IDS)), log_probs(theirs, IDS), atol=1e-5)
    assert {id(p) for p in policy.parameters()} == {
        id(p) for name, p in policy.model.named_parameters() if "lora_" in name
    }
    before = dict(theirs.named_parameters())
    first = {name: tensor.clone() for name, tensor in policy.weights().items()}
    for step in range(2):
        assert found.learn(several(), step, 0)["lr"] == pytest.approx(1e-2)
    for name, tensor in policy.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer", "")]), name
    assert all(not torch.equal(tensor, first[name]) for name, tensor in policy.weights().items())
    assert len(first) == 2 * 7 * theirs.config.num_hidden_layers


def test_every_process_begins_with_the_same_adapter_and_another_seed_with_another(model: Path) -> None:
    torch.manual_seed(1)
    one = learner(model).policy.weights()
    torch.manual_seed(2)
    two, other = learner(model).policy.weights(), learner(model, seed=7).policy.weights()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_merged_is_what_peft_merges_and_the_model_stays_as_it_is(model: Path, tmp_path: Path) -> None:
    import peft
    from safetensors.torch import save_file

    policy = trained(model).policy
    assert policy.adapter is not None
    save_file(policy.weights(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(policy.adapter.config))
    theirs = peft.PeftModel.from_pretrained(base(model), tmp_path).merge_and_unload()
    merged, expected = policy.adapter.merged(), dict(theirs.named_parameters())
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    assert torch.allclose(torch.tensor(policy.raw_log_probs(IDS)), log_probs(theirs, IDS), atol=1e-5)
    with policy.adapter.disabled():
        assert torch.allclose(torch.tensor(policy.raw_log_probs(IDS)), log_probs(base(model), IDS), atol=1e-5)


def test_what_is_published_is_of_the_moment_it_was_taken_at(model: Path) -> None:
    found = trained(model)
    assert found.policy.adapter is not None
    expected = found.policy.adapter.merged()
    taken = found.policy.adapter.snapshot()
    found.learn(several(), 3, 3)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in taken.merged().items())
    assert not all(torch.equal(tensor, expected[name]) for name, tensor in found.policy.adapter.merged().items())


def test_a_resumed_run_ends_exactly_where_an_uninterrupted_one_does(model: Path, tmp_path: Path) -> None:
    def start(run: str, steps: int, pool: Any, *, resume: bool = False) -> Trainer:
        config = TrainerConfig(
            model=model,
            run=tmp_path / run,
            lora=LORA,
            steps=steps,
            pool={"batch_size": 2},
            checkpoint={"every": 1},
        )
        found = Trainer(config, resume=resume, pool=pool)
        found.run()
        return found

    groups = [[0.0, 1.0]] * 8
    whole = start("whole", 4, pool_of(groups, vocabulary=300))
    pool = pool_of(groups, vocabulary=300)
    start("parts", 2, pool)
    again = start("parts", 4, pool, resume=True)
    for name, tensor in whole.learner.policy.weights().items():
        assert torch.equal(tensor, again.learner.policy.weights()[name]), name
    assert again.checkpoints.latest is not None
    files = {file.name for file in again.checkpoints.latest.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer.pt", "tokenizer.json"} <= files
    assert not files & {"model.safetensors", "config.json"}


def test_a_checkpoint_of_another_kind_is_refused(model: Path, tmp_path: Path) -> None:
    def start(**changes: Any) -> Trainer:
        config = TrainerConfig(model=model, run=tmp_path, steps=1, pool={"batch_size": 1}, **changes)
        return Trainer(config, resume=True, pool=pool_of([[0.0, 1.0]], vocabulary=300))

    start(lora=LORA).run()
    with pytest.raises(InvalidInput, match="holds an adapter, and lora is not set"):
        start()
    with pytest.raises(InvalidInput, match=r"lora_A.weight is \(4, .*lora\.rank"):
        start(lora={"rank": 8})
    with pytest.raises(InvalidInput, match="not in the model"):
        start(lora={**LORA, "targets": ["q_proj"]})


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (None, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["q_proj", "mlp.up_proj"], {"q_proj", "up_proj"}),
        (r"model\.layers\.1\..*_proj", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["model.layers.0.self_attn.v_proj"], {"v_proj"}),
    ],
    ids=["all", "names", "regex", "whole name"],
)
def test_targets_are_names_or_one_regex(model: Path, targets: Any, layers: set[str]) -> None:
    found = list(learner(model, {**LORA, "targets": targets}).policy.weights())
    assert {name.split(".")[-3] for name in found} == layers
    if isinstance(targets, str):
        assert all(".layers.1." in name for name in found)
    if targets == ["model.layers.0.self_attn.v_proj"]:
        assert len(found) == 2


@pytest.mark.parametrize("targets", [["q_proj", "wq"], ["lm_head"], "decoder.*", ["embed_tokens"]], ids=str)
def test_targets_that_match_nothing_are_named_with_what_there_is(model: Path, targets: Any) -> None:
    with pytest.raises(InvalidInput, match=r"lora\.targets: (wq|lm_head|decoder\.\*|embed_tokens) matches no .*q_proj"):
        learner(model, {**LORA, "targets": targets})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dropout": 0.1}, "must be 0"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"targets": []}, "is empty"),
        ({"targets": "(q"}, "no regular expression"),
        ({"init": "pissa"}, "kaiming"),
        ({"r": 8}, "Extra inputs"),
    ],
    ids=str,
)
def test_what_could_not_work_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LoraConfig(**given)


def test_rates_and_scale_have_their_defaults(model: Path) -> None:
    config = TrainerConfig(model=model, run=model, lora={}, optimizer={"lr": 2e-6})
    assert config.learning_rate == pytest.approx(2e-5)
    assert TrainerConfig(model=model, run=model, lora={"lr": 1e-4}).learning_rate == 1e-4
    assert LoraConfig(rank=8).scale == 2
    assert LoraConfig(rank=8, alpha=4).scale == 0.5


def test_a_run_file_passes_it_on() -> None:
    given = TrainSection(lora={"rank": 16}, sync={"lora": "merged"})
    assert given.model_dump(mode="json", exclude_defaults=True) == {"lora": {}, "sync": {"lora": "merged"}}
    assert TrainSection(**given.model_dump(mode="json", exclude_defaults=True)) == given


def test_without_peft_it_is_said_how_to_get_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"needs peft: .*lora"):
        learner(model)


def test_the_reference_of_a_kl_is_the_model_without_its_adapter(model: Path) -> None:
    found = learner(model, algorithm={"kl": 0.1})
    assert isinstance(found.reference, WithoutAdapter)
    assert found.learn(several(), 0, 0)["reference_kl"] == pytest.approx(0, abs=1e-9)
    found.learn(several(), 1, 1)
    moved = found.learn(several(), 2, 2)["reference_kl"]
    other = learner(model, algorithm={"kl": 0.1, "reference": model})
    for step in range(2):
        other.learn(several(), step, step)
    assert moved > 1e-6
    assert other.learn(several(), 2, 2)["reference_kl"] == pytest.approx(moved, rel=1e-4)


def test_an_adapter_alone_learns_what_is_rewarded(tmp_path: Path) -> None:
    """A bandit: one token after a fixed prompt, rewarded where its id is small. The head, which is not trained, has
    weights as large as a trained model's."""
    tiny.build(tmp_path, 0, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
               head_dim=16, initializer_range=0.3)  # fmt: skip
    found = learner(tmp_path, {"rank": 4, "lr": 1e-2})
    prompt, rng, rewards = [3, 14, 15, 92], np.random.default_rng(0), []
    given = torch.tensor(prompt)
    positions = torch.arange(len(prompt))
    for step in range(15):
        with torch.no_grad():
            logits = found.policy.model(
                input_ids=given[None], position_ids=positions[None], cuts=[0, len(prompt)], use_cache=False
            ).logits[0, -1]
        every = logits.log_softmax(-1).double().numpy()
        chances = np.exp(every) / np.exp(every).sum()
        tokens = rng.choice(len(chances), size=64, p=chances)
        reward = (tokens < SMALL).astype(np.float32)
        rewards.append(float(reward.mean()))
        made = []
        for token, one in zip(tokens, (reward - reward.mean()) / (reward.std() + 1e-6), strict=True):
            shape = sequence([(len(prompt), len(prompt) + 1)], advantage=float(one))
            ids = np.array([*prompt, token], np.int32)
            log_prob = np.zeros(len(ids), np.float32)
            log_prob[-1] = every[token]
            made.append(replace(shape, tokens=ids, log_probs=log_prob))
        found.learn(made, step, step)
    assert 0.3 < rewards[0] < 0.7
    assert np.mean(rewards[-3:]) > 0.9
