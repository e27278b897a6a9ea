"""Which models are trained: those that the trainer computes as transformers does, and saves as it found them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.backends.models import SIZES
from tests.trainer.kit import pool_of, sequence
from tests.trainer.test_learner import Watched, gradients, learner, ppo_by_hand, reference, several

from headrace.data.errors import InvalidInput
from headrace.trainer import Trainer, TrainerConfig, dry_run, model_check
from headrace.trainer.backends import PackedBackend
from headrace.trainer.config import LoraConfig
from headrace.trainer.policy import Policy
from headrace.trainer.sync import Publisher, SyncConfig
from headrace.trainer.weight_names import LAYER

#: Families with experts, whose names in memory are others than in their checkpoints: a prefix, too, in Mixtral; and
#: with corrections of the router that are no parameters in GLM.
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


#: Rewards of the groups that a run learns from, one a step.
GROUPS = [[0.0, 1.0]] * 3


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**{**SIZES, "eos_token_id": 2, **changes})


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """A small model with random weights, as transformers saves it."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, **changes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    model.save_pretrained(folder)
    return folder


def written(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "of the kind conv: sequences are packed"),
        ("Qwen3Next", {}, "of the kind linear_attention: sequences are packed"),
        ("Llama4Text", {"layer_types": ["chunked_attention"] * 2}, "of the kind chunked_attention: .* no masks"),
    ],
)
def test_layers_that_are_no_attention_to_all_before_are_refused_before_weights_are_loaded(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config_of(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=f"{said}.*such as Llama"):
        Policy(tmp_path)
    with pytest.raises(InvalidInput, match=said):
        dry_run.memory(TrainerConfig(model=tmp_path, run=tmp_path / "run"))


def test_a_layer_that_carries_one_sequence_into_the_next_is_found_by_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "ATTENTION_LAYERS", ("full_attention", "conv"))
    folder = saved(tmp_path, "Lfm2", layer_types=["full_attention", "conv"])
    with pytest.raises(InvalidInput, match="Lfm2ShortConv, which carries one sequence of a packed row into the next"):
        Policy(folder)


def test_logits_that_are_changed_in_an_unknown_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "LOGIT_FACTORS", ("logit_scale",))
    with pytest.raises(InvalidInput, match=r"GraniteForCausalLM\) changes its logits.*logit_scale"):
        Policy(saved(tmp_path, "Granite", logits_scaling=3.0))


def test_a_sliding_window_is_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="sliding_window=4"):
        Policy(saved(tmp_path, "Mistral", sliding_window=4))


def test_the_text_part_of_a_model_with_images_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForCausalLM

    text = config_of("Qwen3_5Text", layer_types=["full_attention"] * 2)
    Qwen3_5ForCausalLM(text).save_pretrained(tmp_path)
    Qwen3_5Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="is a qwen3_5, of which Qwen3_5ForCausalLM is the text part"):
        Policy(tmp_path)


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"), [("Granite", {"logits_scaling": 0.25}), ("Cohere", {"logit_scale": 4.0})]
)
def test_a_factor_of_the_logits_is_learned_with(
    family: str, changes: dict[str, Any], chunked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunked:
        monkeypatch.setattr("headrace.trainer.logits.MAX_LOGITS", 4 * 300)
    folder = saved(tmp_path, family, vocab_size=300, initializer_range=0.02, **changes)
    sequences, mine, theirs = several(), learner(folder), reference(folder)
    mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
    told = mine.learn(sequences, 0, 0)
    loss = ppo_by_hand(theirs, sequences)
    loss.backward()
    assert told["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert watched.seen is not None
    assert torch.allclose(watched.seen, gradients(theirs), atol=4e-5)
    assert float(watched.seen.abs().max()) > 1e-3


def test_servers_are_compared_with_logits_that_have_their_factor(tmp_path: Path) -> None:
    folder, ids = saved(tmp_path, "Granite", logits_scaling=0.25), [5, 3, 8, 1, 13, 2]
    with torch.no_grad():
        logits = reference(folder)(torch.tensor([ids])).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert Policy(folder).raw_log_probs(ids) == pytest.approx(wanted.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("OPT", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5, "ffn_dim": 48, "init_std": 0.3}),
        ("SeedOss", {"residual_dropout": 0.5, "attention_dropout": 0.5}),
        ("Phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("Mixtral", {**EXPERTS["Mixtral"], "router_jitter_noise": 0.5}),
    ],
)
def test_nothing_drops_out_while_a_model_learns(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    policy = Policy(saved(tmp_path, family, **changes))
    one = sequence([(2, 12)], vocabulary=37)
    packed = PackedBackend().convert([one])
    found, _ = policy.log_probs(packed)
    assert found.requires_grad
    assert found.tolist() == pytest.approx(policy.raw_log_probs(one.tokens.tolist())[1:], abs=1e-4)
    assert found.tolist() == policy.log_probs(packed)[0].tolist()


# -- what is saved and published ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EXPERTS)
def test_a_checkpoint_has_the_names_of_the_one_that_it_came_from(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, **EXPERTS[family])
    found, expected = learner(folder).weights(), written(folder)
    assert found.keys() == expected.keys()
    assert any(".experts.3." in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_what_is_neither_trained_nor_a_parameter_is_in_a_checkpoint_too(tmp_path: Path) -> None:
    found = learner(saved(tmp_path, "Glm4Moe", **EXPERTS["Glm4Moe"])).weights()
    (bias,) = [tensor for name, tensor in found.items() if name.endswith("e_score_correction_bias")]
    assert bias.abs().min() > 0


def run(folder: Path, into: Path, steps: int, pool: Any = None, *, resume: bool = False) -> Trainer:
    config = TrainerConfig(
        model=folder,
        run=into,
        steps=steps,
        pool={"batch_size": 1, "prefetch": False},
        optimizer={"lr": 1e-3},
        checkpoint={"every": 1},
    )
    found = Trainer(config, resume=resume, pool=pool_of(GROUPS, vocabulary=37) if pool is None else pool)
    found.run()
    return found


def test_a_run_with_experts_goes_on_bit_for_bit_from_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path / "model", "Mixtral", **EXPERTS["Mixtral"])
    whole, pool = run(folder, tmp_path / "whole", 3), pool_of(GROUPS, vocabulary=37)
    run(folder, tmp_path / "parts", 2, pool)
    again = run(folder, tmp_path / "parts", 3, pool, resume=True)
    begun, ended = written(folder), whole.learner.weights()
    assert any(not torch.equal(begun[name], tensor) for name, tensor in ended.items() if ".experts." in name)
    assert all(torch.equal(tensor, ended[name]) for name, tensor in again.learner.weights().items())
    assert again.checkpoints.latest is not None
    assert written(again.checkpoints.latest).keys() == begun.keys()
    loaded = dict(AutoModelForCausalLM.from_pretrained(again.checkpoints.latest).named_parameters())
    assert all(torch.equal(tensor.cpu(), loaded[name]) for name, tensor in again.learner.policy.weights().items())


def test_a_checkpoint_with_other_experts_is_of_another_model(tmp_path: Path) -> None:
    few = saved(tmp_path / "few", "Mixtral", **EXPERTS["Mixtral"])
    more = saved(tmp_path / "more", "Mixtral", **{**EXPERTS["Mixtral"], "num_local_experts": 6})
    run(few, tmp_path / "run", 1)
    with pytest.raises(InvalidInput, match=r"is a checkpoint of another model than .*more: model\.layers\.0\.mlp"):
        run(more, tmp_path / "run", 2, resume=True)


def test_servers_get_experts_one_by_one_and_no_more_than_a_layer_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    folder = saved(tmp_path, "Qwen3Moe", **EXPERTS["Qwen3Moe"])
    policy, revert = Policy(folder), core_model_loading.revert_weight_conversion
    together: list[set[str]] = []

    def noting(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        together.append({found[0] if (found := LAYER.match(name)) else "" for name in weights})
        return revert(model, weights)  # type: ignore[no-any-return]

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", noting)
    copied = Publisher(SyncConfig(servers=["http://127.0.0.1:9"])).snapshot(policy.weights())
    found, expected = policy.in_checkpoint(copied), written(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert copied == {}
    assert sorted(map(len, together)) == [1, 1, 1]
    assert set.union(*together) == {"", "model.layers.0", "model.layers.1"}


def test_an_adapter_beside_experts_is_merged_under_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Qwen3Moe", **EXPERTS["Qwen3Moe"])
    policy = Policy(folder, lora=LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    assert policy.adapter is not None
    found, expected = policy.adapter.merged(), written(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
