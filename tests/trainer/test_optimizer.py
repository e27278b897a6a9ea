"""Masters: a model in bfloat16 learns as one in float32 does, within its rounding, and goes on exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.test_learner import learner, several
from torch import Tensor, nn

from headrace.trainer.optimizer import MasterAdamW, narrow

RULE: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def inputs_of(seed: int) -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))


def mastered(model: nn.Module, **options: Any) -> MasterAdamW:
    exact = narrow(model.parameters(), torch.bfloat16)
    return MasterAdamW(model.parameters(), exact=exact, **RULE, **options)


def step(model: nn.Module, optimizer: Any, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    model(inputs_of(seed).to(dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_masters_begin_exactly_and_the_model_is_their_rounding() -> None:
    model = model_of()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = mastered(model)
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(optimizer.master(parameter), value)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, value.to(torch.bfloat16))


def test_updates_that_bfloat16_cannot_show_add_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    exact = narrow(model.parameters(), torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), exact=exact, **{**RULE, "lr": 1e-3, "weight_decay": 0.0})
    for _ in range(8):  # each moves the weight by a thousandth; bfloat16 knows 1 and 0.99609375
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.master(model.weight).item() == pytest.approx(0.992, abs=1e-4)
    assert model.weight.item() == 0.9921875


def test_gradients_of_passes_are_summed_in_float32() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = mastered(model)
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad is None
    (gradient,) = optimizer.gradients
    assert gradient.dtype == torch.float32
    assert gradient.item() == 258.0


def test_with_float32_weights_it_is_torchs_adamw() -> None:
    mine, theirs = model_of(), model_of()
    ours = MasterAdamW(mine.parameters(), offload=True, **RULE)
    plain = torch.optim.AdamW(theirs.parameters(), fused=True, **RULE)
    for seed in range(5):
        step(mine, ours, seed)
        step(theirs, plain, seed)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_norm_is_torchs_and_clips_as_torch_does() -> None:
    mine, theirs = model_of(), model_of()
    ours = MasterAdamW(mine.parameters(), offload=True, **RULE)
    for model in (mine, theirs):
        (100 * model(inputs_of(0))).square().mean().backward()
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert ours.clip(1.0).item() == pytest.approx(wanted.item(), rel=1e-6)
    for gradient, parameter in zip(ours.gradients, theirs.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_parameter_that_is_not_trained_stays() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = mastered(model)
    before = copy.deepcopy(model.state_dict())
    step(model, optimizer, 0)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert optimizer.master(model[0].weight).dtype == torch.bfloat16
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_offloaded_it_learns_the_same() -> None:
    one, other = model_of(), model_of()
    optimizers = mastered(one), mastered(other, offload=True)
    for seed in range(5):
        step(one, optimizers[0], seed)
        step(other, optimizers[1], seed)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimizers[0].master(mine), optimizers[1].master(theirs))


# -- the learner ----------------------------------------------------------------------------------------------------


def learned(mine: Any, steps: range) -> dict[str, float]:
    told: dict[str, float] = {}
    for at in steps:
        told = mine.learn(several(), at, at)
    return told


def test_a_learner_with_bfloat16_weights_learns_as_in_float32(model: Path) -> None:
    """Their weights differ by no more than one half of the way that each has come."""
    begun = learner(model).weights()
    exact, rough = learner(model), learner(model, dtype="bfloat16")
    learned(exact, range(6))
    learned(rough, range(6))
    assert {parameter.dtype for parameter in rough.policy.parameters()} == {torch.bfloat16}
    moved = torch.cat([(exact.weights()[name] - begun[name]).flatten() for name in begun])
    apart = torch.cat([(exact.weights()[name] - rough.weights()[name]).flatten() for name in begun])
    assert float(moved.norm()) > 0.1
    assert float(apart.norm()) < 0.5 * float(moved.norm())


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_a_resumed_learner_goes_on_bit_for_bit(model: Path, offload: str, advantage: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "memory": {"offload": offload}}
    if advantage == "gae":
        options["algorithm"] = {"advantage": "gae"}
    whole = learner(model, **options)
    learned(whole, range(2))
    weights = {name: tensor.clone() for name, tensor in whole.weights().items()}
    state = copy.deepcopy(whole.state())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    resumed = learner(model, **options)
    resumed.restore(weights, state)
    assert learned(resumed, range(2, 4)) == learned(whole, range(2, 4))
    for name, tensor in whole.weights().items():
        assert torch.equal(resumed.weights()[name], tensor), name
    for name, tensor in whole.policy.weights().items():
        assert torch.equal(resumed.policy.weights()[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_goes_by_what_its_configuration_says_now(model: Path, dtype: str) -> None:
    begun = learner(model, dtype=dtype, algorithm={"advantage": "gae"}, critic={"lr": 1e-5})
    learned(begun, range(1))
    rule = {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    going = learner(model, dtype=dtype, algorithm={"advantage": "gae"}, critic={"lr": 3e-4}, optimizer=rule)
    going.restore(begun.weights(), begun.state())
    for optimizer in (going.optimizer, going.critic_optimizer):
        assert optimizer is not None
        (group,) = optimizer.param_groups
        assert {name: group[name] for name in rule} == rule
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1}
    assert going.critic_optimizer is not None
    assert going.critic_optimizer.param_groups[0]["lr"] == 3e-4


def test_a_float32_run_goes_on_in_bfloat16(model: Path) -> None:
    begun = learner(model)
    learned(begun, range(2))
    going = learner(model, dtype="bfloat16")
    going.restore(begun.weights(), begun.state())
    assert all(torch.equal(going.weights()[name], tensor) for name, tensor in begun.weights().items())
    assert learned(going, range(2, 3))["updates"] == 1


def test_weights_may_stay_float32_and_be_cast(model: Path) -> None:
    mine = learner(model, dtype="bfloat16", memory={"weights": "float32"})
    learned(mine, range(1))
    assert {parameter.dtype for parameter in mine.policy.parameters()} == {torch.float32}
    assert isinstance(mine.optimizer, torch.optim.AdamW)


def test_an_update_that_is_not_finite_is_left_out(model: Path) -> None:
    sequences = several()
    sequences[0].log_probs[2] = -float("inf")
    mine = learner(model, dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in mine.weights().items()}
    assert mine.learn(sequences, 0, 0)["updates_not_finite"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.weights().items())
    assert isinstance(mine.optimizer, MasterAdamW)
    assert not mine.optimizer.gradients
