"""The forecast of memory, against the bytes that a pass keeps; and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.matrix import crossed
from tests.trainer.backends.models import llama, qwen3
from tests.trainer.kit import sequence
from tests.trainer.test_learner import learner, several
from torch import Tensor

from headrace.data.errors import InvalidInput
from headrace.trainer import attention, dry_run, memory
from headrace.trainer.config import TrainerConfig
from headrace.trainer.decoder import Decoder
from headrace.trainer.dry_run import memory as reported
from headrace.trainer.learner import Learner
from headrace.trainer.memory import GIB, MemoryLimits, MemoryUse, ModelShape
from headrace.trainer.optimizer import MasterAdamW, narrow
from headrace.trainer.policy import Policy
from headrace.trainer.sync import Publisher, SyncConfig

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")

#: 1.15 B parameters.
LARGE = ModelShape(
    parameters=1_141_116_928,
    trained=1_141_116_928,
    in_layers=973_144_064,
    decoder=1_057_131_520,
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    vocabulary=32768,
)
BF16 = MemoryUse(computed=2, weights=2)
H200 = 139 * GIB


def kept_bytes(model: Any, use: MemoryUse, tokens: int) -> int:
    """What a pass over one sequence keeps for its backward pass: every storage once, without the weights."""
    dtype = torch.bfloat16 if use.computed == 2 else torch.float32
    if use.weights == 2:
        narrow(model.parameters(), torch.bfloat16)
    found = Decoder(model.get_decoder(), dtype, torch.device("cpu"))
    found.recompute_beyond = 0 if use.recompute else None
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # tensors stay alive, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights and tensor.is_floating_point():
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = found.states(torch.arange(tokens) % 37, torch.arange(tokens), cuts=[0, tokens])
        predicting = states[torch.arange(tokens)]
        (predicting @ model.lm_head.weight.detach().to(predicting.dtype).T.requires_grad_()).sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16},
    {"hidden_size": 96, "intermediate_size": 256, "head_dim": 24, "num_key_value_heads": 4, "num_hidden_layers": 3},
]


@pytest.mark.parametrize(
    ("widths", "recompute", "sizes", "family"),
    crossed([(4, 4), (2, 2), (2, 4)], [False, True], SHAPES, [llama, qwen3]),  # float32, bfloat16, and cast to it
)
def test_what_a_pass_keeps_is_foretold(
    family: Any, sizes: dict[str, Any], recompute: bool, widths: tuple[int, int]
) -> None:
    model = family(attention.NAME, **sizes)
    use = MemoryUse(computed=widths[0], weights=widths[1], recompute=recompute)
    measured = kept_bytes(model, use, 256)
    assert memory.kept_by_pass(ModelShape.of(model), use, 256) == pytest.approx(measured, rel=0.15)


COMPUTING = "backward pass of the logits or of one layer"


def test_a_shape_is_read_from_a_model() -> None:
    model = qwen3(attention.NAME)
    model.lm_head.requires_grad_(False)
    shape = ModelShape.of(model)
    assert (shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 2, 4, 2, 8)
    assert shape.parameters == model.num_parameters()
    assert shape.parameters - shape.trained == model.lm_head.weight.numel()
    assert shape.parameters - shape.decoder == model.lm_head.weight.numel()
    assert shape.in_layers == sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert shape.qk_norm
    assert not ModelShape.of(llama(attention.NAME)).qk_norm


def test_128k_tokens_at_a_billion_parameters_fit_one_gpu_once_layers_are_recomputed() -> None:
    tokens = 131_072
    assert sum(memory.forecast(LARGE, BF16, tokens).values()) > H200
    assert sum(memory.forecast(LARGE, replace(BF16, recompute=True), tokens).values()) < 0.5 * H200
    limits = MemoryLimits.of(LARGE, replace(BF16, recompute=True), H200)
    assert limits.without_recompute < tokens < limits.longest


def test_the_longest_that_fits_does_and_one_more_token_does_not() -> None:
    use = replace(BF16, recompute=True, published=True)
    most = memory.longest(LARGE, use, H200)
    assert sum(memory.forecast(LARGE, use, most).values()) <= memory.USABLE * H200
    assert sum(memory.forecast(LARGE, use, most + 1).values()) > memory.USABLE * H200


def test_what_is_offloaded_is_not_on_the_device() -> None:
    here = memory.forecast(LARGE, BF16, 0)
    away = memory.forecast(LARGE, replace(BF16, offload=True), 0)
    assert sum(here.values()) - sum(away.values()) == 12 * LARGE.parameters
    assert memory.offloaded(LARGE, replace(BF16, offload=True)) == 16 * LARGE.parameters
    assert memory.offloaded(LARGE, BF16) == 0


@pytest.mark.parametrize("change", ["reference", "critic", "published"])
def test_another_copy_takes_its_bytes(change: str) -> None:
    more = sum(memory.forecast(LARGE, replace(BF16, **{change: True}), 0).values())
    wanted = {"reference": 2 * LARGE.parameters, "critic": 18 * LARGE.decoder, "published": 2 * LARGE.parameters}
    assert more - sum(memory.forecast(LARGE, BF16, 0).values()) == wanted[change]


def held_bytes(mine: Learner) -> int:
    """What a learner holds between two steps: every storage once."""
    models = [mine.policy.model]
    models += [mine.critic] if mine.critic is not None else []
    models += [mine.reference.model] if isinstance(mine.reference, Policy) else []
    parameters = [parameter for model in models for parameter in model.parameters()]
    held = [parameter.detach() for parameter in parameters]
    for optimizer in (mine.optimizer, mine.critic_optimizer):
        if isinstance(optimizer, MasterAdamW):
            held += map(optimizer.master, parameters)
        if optimizer is not None:
            held += [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
@pytest.mark.parametrize("algorithm", [{}, {"kl": 0.1}, {"kl": 0.1, "reference": True}, {"advantage": "gae"}], ids=str)
def test_what_a_learner_holds_is_foretold(model: Path, dtype: str, lora: Any, algorithm: dict[str, Any]) -> None:
    named = {"reference": model} if "reference" in algorithm else {}
    mine = learner(model, dtype=dtype, lora=lora, algorithm={**algorithm, **named})
    mine.learn(several(), 0, 0)
    shape = ModelShape.of(mine.policy.model)
    found = memory.forecast(shape, MemoryUse.of(mine.config), 0)
    gradients = memory.GRADIENT * (shape.trained + (shape.decoder if mine.critic is not None else 0))
    passing = sum(found.get(name, 0) for name in ("casts of the weights", "activations", COMPUTING))
    assert sum(found.values()) - gradients - passing == pytest.approx(held_bytes(mine), rel=0.02)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_the_copy_that_is_published_is_foretold(model: Path, lora: Any) -> None:
    mine = learner(model, lora=lora)
    adapter = mine.policy.adapter
    whole = Publisher(SyncConfig(servers=["http://127.0.0.1:9"])).snapshot(mine.policy.weights())
    copied = whole if adapter is None else adapter.snapshot().tensors
    found = memory.forecast(ModelShape.of(mine.policy.model), MemoryUse.of(mine.config, synced=True), 0)
    assert found["the copy that is published"] == sum(tensor.nbytes for tensor in copied.values())


def test_of_several_ranks_each_holds_a_part_and_the_layers_that_it_gathers(tmp_path: Path) -> None:
    config = TrainerConfig(
        model=tmp_path, run=tmp_path, dtype="bfloat16", algorithm={"kl": 0.1, "advantage": "gae"}, device="cuda"
    )
    found = memory.forecast(LARGE, MemoryUse.of(config, "cuda", synced=True, ranks=8), 0)
    outside, layer = LARGE.parameters - LARGE.in_layers, LARGE.in_layers // LARGE.layers
    assert {name: size for name, size in found.items() if name != COMPUTING} == {
        "weights": LARGE.parameters // 2,  # float32, whatever is computed in
        "AdamW's averages": LARGE.parameters,
        "gradients": LARGE.parameters // 2,
        "layers gathered from all ranks": 4 * outside + 10 * layer,
        "reference": LARGE.parameters // 2,
        "critic": 2 * LARGE.decoder,
    }
    on_cpus = memory.forecast(LARGE, MemoryUse.of(config, "cpu", synced=True, ranks=8), 0)
    assert on_cpus["the copy that is published"] == 4 * LARGE.parameters  # rank 0's, in the host's memory


def test_logits_stop_growing_where_they_are_computed_in_chunks() -> None:
    peaks = (memory.forecast(LARGE, BF16, tokens)[COMPUTING] for tokens in (1024, 8192, 16_384))
    few, more, most = peaks
    assert few < more == most < 2 * GIB


@pytest.mark.parametrize(
    ("tokens", "several", "recompute", "measured"),
    [
        (27_648, True, False, 51.55),
        (16_384, True, False, 38.39),
        (65_536, False, False, 91.90),
        (65_536, False, True, 24.43),
        (131_072, False, True, 34.08),
    ],
)
def test_the_forecast_is_what_a_gpu_took(tokens: int, several: bool, recompute: bool, measured: float) -> None:
    """GiB at the peak of steps of examples/gpu_bench.py on an H200: compiled layers, a third of the tokens trained."""
    shape = replace(LARGE, parameters=1_107_363_840, trained=1_107_363_840, vocabulary=32_768)
    use = replace(BF16, compiled=True, recompute=recompute)
    found = memory.forecast(shape, use, tokens, tokens // 3, several=several)
    assert sum(found.values()) / GIB == pytest.approx(measured, rel=0.15)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(InvalidInput, match=r"1,141,116,928 parameters.*10\.00 GiB.*weights 2\.13.*offload: optimizer"):
        MemoryLimits.of(LARGE, BF16, 10 * GIB)


def test_a_sequence_that_does_not_fit_is_named_before_anything_is_learned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.trainer.learner.available_bytes", lambda device: 4 << 20)
    mine = learner(model)
    before = {name: tensor.clone() for name, tensor in mine.weights().items()}
    long = sequence([(2, mine.limits.longest + 1)], advantage=1.0, uid="too-long")
    with pytest.raises(InvalidInput, match=rf"too-long has {len(long):,} tokens.*about {mine.limits.longest:,}"):
        mine.learn([*several(), long], 0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.weights().items())


def test_layers_are_recomputed_by_themselves_where_a_pass_would_not_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = learner(model)
    wanted = plain.learn(several(), 0, 0)
    assert plain.policy.decoder.recompute_beyond is not None
    assert plain.policy.decoder.recompute_beyond > 16384
    monkeypatch.setattr("headrace.trainer.learner.available_bytes", lambda device: 3 << 20)
    tight = learner(model)
    assert tight.policy.decoder.recompute_beyond == tight.limits.without_recompute < tight.limits.longest
    always = learner(model, memory={"recompute": "layers"})
    assert always.policy.decoder.recompute_beyond == 0
    assert always.learn(several(), 0, 0) == wanted
    assert learner(model, memory={"recompute": "none"}).policy.decoder.recompute_beyond is None


@pytest.mark.parametrize(
    ("changes", "device", "parameters", "wanted"),
    [
        ({}, "cuda", 10**9, False),
        ({"dtype": "bfloat16"}, "cuda", 10**9, True),
        ({"dtype": "bfloat16"}, "cpu", 10**9, False),
        ({"dtype": "bfloat16"}, "cuda", 10**6, False),
        ({"dtype": "bfloat16", "optimizer": {"tokens": 512}}, "cuda", 10**9, False),
        ({"dtype": "bfloat16", "compile": "off"}, "cuda", 10**9, False),
        ({"compile": "on"}, "cpu", 10**6, True),
    ],
)
def test_layers_are_compiled_where_it_pays(
    changes: dict[str, Any], device: str, parameters: int, wanted: bool, tmp_path: Path
) -> None:
    config = TrainerConfig(model=tmp_path, run=tmp_path, **changes)
    assert memory.compiles(config, device, parameters) == wanted


def test_narrow_weights_under_a_wide_computation_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set dtype: bfloat16 too"):
        TrainerConfig(model=tmp_path, run=tmp_path, memory={"weights": "bfloat16"})


def test_a_dry_run_tells_what_is_needed_and_the_longest_that_fits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainer.dry_run.available_bytes", lambda device: GIB // 64)
    given = {"dtype": "bfloat16", "device": "cpu", "optimizer": {"tokens": 16384}}
    said = reported(TrainerConfig(model=model, run=model, memory={"offload": "optimizer"}, **given))
    assert said["together"].endswith("GiB on cpu")
    assert said["layers are"] == "recomputed"
    assert int(said["longest sequence that fits"].split()[0].replace(",", "")) > 100
    assert said["in the CPU's memory"] == "0.00 GiB"
    assert "tokens" in said["layers are recomputed"]


def test_passes_are_no_longer_than_fits_on_a_gpu() -> None:
    limits = MemoryLimits(100, 1000, GIB)
    assert limits.pass_tokens(500, "cuda") == 500
    assert limits.pass_tokens(5000, "cuda") == 1000
    assert limits.pass_tokens(5000, "cpu") == 5000


def test_a_dry_run_with_lora_counts_what_is_trained_and_names_wrong_targets(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[ModelShape] = []

    def noted(shape: ModelShape, *given: Any) -> dict[str, int]:
        shapes.append(shape)
        return memory.forecast(shape, *given)

    monkeypatch.setattr(dry_run, "forecast", noted)
    for lora in (None, {"rank": 4}, {"rank": 8}):
        reported(TrainerConfig(model=folder, run=tmp_path, lora=lora, device="cpu"))
    whole, few, more = shapes
    assert whole.trained == whole.parameters
    assert more.trained == 2 * few.trained
    assert few.parameters == whole.parameters + few.trained
    with pytest.raises(InvalidInput, match="targets: nothing matches no linear layer"):
        reported(TrainerConfig(model=folder, run=tmp_path, lora={"targets": ["nothing"]}))
