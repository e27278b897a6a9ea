"""Recomputed and compiled layers: the same numbers, in less memory or less time."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.trainer.backends.models import llama, qwen3
from torch import Tensor

from headrace.data.errors import InvalidInput
from headrace.trainer import attention, decoder
from headrace.trainer.decoder import Decoder

CUTS = [0, 9, 30, 41]


def decoder_of(model: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(model.get_decoder(), dtype, torch.device("cpu"))


def states(found: Decoder, cuts: list[int] = CUTS) -> Tensor:
    ids = torch.randint(37, (cuts[-1],), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cuts)])
    return found.states(ids, positions, cuts=cuts)


def gradients(model: Any, found: Decoder, cuts: list[int] = CUTS) -> list[Tensor]:
    trained = list(model.get_decoder().parameters())
    return list(torch.autograd.grad(states(found, cuts).square().sum(), trained))


@pytest.mark.parametrize("family", [llama, qwen3])
def test_recomputed_layers_give_the_same_gradients_bit_for_bit(family: Any) -> None:
    model = family(attention.NAME)
    found = decoder_of(model)
    kept = gradients(model, found)
    found.recompute_beyond = 0
    for mine, theirs in zip(gradients(model, found), kept, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("beyond", "times"), [(None, 1), (CUTS[-1], 1), (CUTS[-1] - 1, 2), (0, 2)])
def test_layers_are_recomputed_beyond_so_many_tokens(beyond: int | None, times: int) -> None:
    model = llama(attention.NAME)
    found = decoder_of(model)
    found.recompute_beyond = beyond
    calls: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model, found)
    assert len(calls) == times * len(model.model.layers)


def test_without_a_gradient_nothing_is_recomputed_or_kept() -> None:
    found = decoder_of(llama(attention.NAME))
    found.recompute_beyond = 0
    with torch.no_grad():
        assert not states(found).requires_grad


def test_a_model_without_a_list_of_layers_cannot_be_recomputed() -> None:
    model = llama(attention.NAME)
    inner = model.get_decoder()
    inner.layers = None
    found = Decoder(inner, torch.float32, torch.device("cpu"))
    found.recompute_beyond = 0
    with pytest.raises(InvalidInput, match="recompute: none"):
        states(found)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compiles for no machine: the graphs that were traced are run as they are."""
    graphs: list[Any] = []
    compile_ = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_(function, backend=backend, **given))
    return graphs


@pytest.mark.long
def test_layers_compile_once_for_all_lengths_and_layers(traced: list[Any]) -> None:
    model, plain = llama(attention.NAME, num_hidden_layers=3), llama(attention.NAME, num_hidden_layers=3)
    found = decoder_of(model)
    found.compile()
    assert found.compiled
    graphs = len(traced)
    for cuts in (CUTS, [0, 17], [0, 3, 5, 60, 64], [0, 1, 2, 90]):
        for mine, theirs in zip(gradients(model, found, cuts), gradients(plain, decoder_of(plain), cuts), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert len(traced) == graphs


def test_compiled_layers_can_be_recomputed(traced: list[Any]) -> None:
    model = llama(attention.NAME)
    found = decoder_of(model)
    kept = gradients(model, found)
    found.compile()
    found.recompute_beyond = 0
    for mine, theirs in zip(gradients(model, found), kept, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert found.compiled


def test_where_compiling_fails_layers_run_plainly_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_ = torch.compile

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **given: compile_(function, backend=broken, **given))
    model = llama(attention.NAME)
    found = decoder_of(model)
    kept = gradients(model, found)
    with caplog.at_level(logging.WARNING, decoder.__name__):
        found.compile()
        for mine, theirs in zip(gradients(model, found), kept, strict=True):
            assert torch.equal(mine, theirs)
    assert not found.compiled
    (record,) = [record for record in caplog.records if record.name == decoder.__name__]
    assert "no compiler here" in record.getMessage()
    assert all(parameter.grad is None for parameter in model.parameters())
