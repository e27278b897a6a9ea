"""What rounding explains is allowed, in every precision, depth and length; a layer that is wrong is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from headrace.trainer.sync.weights import Gap, Probe, tolerance

VOCABULARY = 128


def llama(layers: int, size: float) -> Any:
    """A small model whose weights are as large as `size`: 0.02 as at the beginning of training, 0.5 so large that its
    attention looks at one token alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        initializer_range=size,
    )
    return LlamaForCausalLM(config).eval()


def log_probs(model: Any, ids: torch.Tensor, *, autocast: bool = False) -> list[float]:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        every = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = every.gather(-1, ids[1:, None])[:, 0].tolist()
    return found


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a processor without bfloat16 says so
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
@pytest.mark.parametrize("length", [4, 12, 96])
@pytest.mark.parametrize(("layers", "size"), [(2, 0.02), (2, 0.2), (2, 0.5), (6, 0.1), (12, 0.05)])
def test_a_server_in_fewer_bits_is_no_alarm_and_one_wrong_layer_is(
    layers: int, size: float, length: int, dtype: str
) -> None:
    model = llama(layers, size)
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    rounded = copy.deepcopy(model).to(getattr(torch, dtype))
    for autocast in (False, True):  # the trainer may round too, elsewhere
        probe = Probe(ids.tolist(), log_probs(model, ids, autocast=autocast), "bfloat16" if autocast else None, layers)
        allowed = tolerance(probe, "float32", probe.dtype, dtype)
        assert probe.gap(log_probs(rounded, ids)).within(allowed)
    if length == 96:
        wrong = copy.deepcopy(model)
        wrong.model.layers[layers // 2] = copy.deepcopy(llama(layers + 1, size).model.layers[0])
        assert not probe.gap(log_probs(wrong.to(getattr(torch, dtype)), ids)).within(allowed)


def test_the_coarsest_precision_involved_decides() -> None:
    probe = Probe(range(9), [-1.0, -3.0] * 4)
    assert tolerance(probe, "float32", None, "bfloat16") == tolerance(probe, "bfloat16")
    assert tolerance(probe, "float16", "float32").largest > tolerance(probe, None).largest == 1e-3
    assert not Gap(0.5, 0.5).within(tolerance(probe, "bfloat16"))  # far off everywhere, nowhere by much


def test_what_is_allowed_grows_with_depth_and_spread_and_hardly_with_length() -> None:
    def allowed(count: int, spread: float, layers: int) -> Gap:
        return tolerance(Probe(range(2 * count + 1), [-2 * spread, 0.0] * count, layers=layers), "bfloat16")

    usual = allowed(64, 1.0, 32)
    assert allowed(64, 1.0, 128).largest == pytest.approx(2 * usual.largest)
    assert allowed(64, 3.0, 32).mean == pytest.approx(3 * usual.mean, rel=0.05)
    assert usual.largest < allowed(4096, 1.0, 32).largest < 1.5 * usual.largest
    assert allowed(4096, 1.0, 32).mean < usual.mean
    assert 0.8 < usual.largest < 1.5
    assert 0.05 < usual.mean < 0.2
