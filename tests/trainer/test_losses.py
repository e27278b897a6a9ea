"""Losses in float64 against formulas written out token by token, and their gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.trainer import losses
from headrace.trainer.config import LOSSES as NAMES
from headrace.trainer.config import AlgorithmConfig
from headrace.trainer.losses import LOSSES, LossBatch
from headrace.trainer.own_functions import check_loss

log_prob = st.floats(-4, -0.01)
rows = st.lists(st.tuples(log_prob, log_prob, st.floats(-2, 2), st.floats(0, 1)), min_size=1, max_size=6)


def columns(found: list[tuple[float, ...]]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True)]


def batch_of(
    now: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    sequence: list[int] | None = None,
    importance: Tensor | None = None,
    rollout: Tensor | None = None,
    **algorithm: object,
) -> LossBatch:
    """A batch of these targets; of one sequence unless it is said which each belongs to."""
    which = torch.tensor(sequence or [0] * len(now))
    return LossBatch(
        log_probs=now,
        old_log_probs=old,
        rollout_log_probs=old if rollout is None else rollout,
        importance=torch.ones_like(old) if importance is None else importance,
        advantages=advantages,
        weights=weights,
        entropy=torch.zeros_like(old),
        sequence=which,
        sequences=int(which.max()) + 1,
        versions=torch.zeros(len(now), dtype=torch.int64),
        version=0,
        algorithm=AlgorithmConfig.model_validate(algorithm),
    )


def loss_of(batch: LossBatch, name: str | None = None) -> Tensor:
    """The number alone."""
    found = LOSSES[name or batch.algorithm.loss](batch)
    return found[0] if isinstance(found, tuple) else found


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@given(rows, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_ppo_takes_the_worse_of_the_plain_and_the_clipped_gain(
    found: list[tuple[float, float, float, float]], low: float, high: float
) -> None:
    wanted = 0.0
    for now, old, advantage, weight in found:
        ratio = math.exp(now - old)
        wanted -= weight * min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    assert float(loss_of(batch_of(*columns(found), clip=low, clip_high=high))) == pytest.approx(wanted, abs=1e-9)


@given(rows, st.floats(0.5, 3))
def test_tis_weighs_by_the_ratio_up_to_its_cap(found: list[tuple[float, float, float, float]], cap: float) -> None:
    wanted = -math.fsum(w * min(math.exp(now - old), cap) * a * now for now, old, a, w in found)
    assert float(loss_of(batch_of(*columns(found), loss="tis", cap=cap))) == pytest.approx(wanted, abs=1e-9)


@given(rows)
def test_ppo_with_an_importance_weight_scales_each_tokens_gain(found: list[tuple[float, float, float, float]]) -> None:
    now, old, advantages, weights = columns(found)
    importance = losses.truncated_importance(old, now, cap=1.5)
    assert importance.tolist() == pytest.approx([min(math.exp(o - n), 1.5) for n, o, _, _ in found])
    scaled = loss_of(batch_of(now, old, advantages, weights, importance=importance))
    assert torch.allclose(scaled, loss_of(batch_of(now, old, advantages, weights * importance)))


@given(log_prob, log_prob)
def test_kl_estimators(now: float, reference: float) -> None:
    one, other = torch.tensor([now], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    difference = reference - now
    assert float(losses.kl(one, other, "k2")) == pytest.approx(difference**2 / 2)
    assert float(losses.kl(one, other, "k3")) == pytest.approx(math.exp(difference) - 1 - difference, abs=1e-12)


def test_the_k3_estimator_is_unbiased_over_a_whole_distribution() -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 12, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    assert float((policy.exp() * losses.kl(policy, reference, "k3")).sum()) == pytest.approx(exact)


def test_the_critic_pays_for_the_worse_of_its_value_and_the_one_held_near_the_old() -> None:
    values, old, returns = (torch.tensor([x], dtype=torch.float64) for x in (1.0, 0.0, 2.0))
    held = 0.2
    wanted = 0.5 * max((1.0 - 2.0) ** 2, (held - 2.0) ** 2)
    assert float(losses.value_loss(values, old, returns, torch.ones(1), clip=0.2)) == pytest.approx(wanted)


def test_clipped_tokens_are_those_without_a_gradient() -> None:
    torch.manual_seed(1)
    now = torch.randn(200, dtype=torch.float64, requires_grad=True)
    old, advantages = torch.randn(2, 200, dtype=torch.float64)
    loss, metrics = losses.ppo(batch_of(now, old, advantages, torch.ones(200), clip=0.2, clip_high=0.3))
    loss.backward()
    assert now.grad is not None
    assert torch.equal(now.grad == 0, metrics["clip_fraction"])


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    "loss",
    [
        lambda now, old, a, w: loss_of(batch_of(now, old, a, w, clip=0.2, clip_high=0.3)),
        lambda now, old, a, w: (w * losses.kl(now, old, "k3")).sum(),
        lambda now, old, a, w: (w * losses.kl(now, old, "k2")).sum(),
        lambda now, old, a, w: losses.value_loss(now, old, a, w, clip=0.2),
    ],
    ids=["ppo", "k3", "k2", "value"],
)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_gradients_are_finite_differences(loss: Loss, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    now, old, advantages, weights = torch.randn(4, 5, dtype=torch.float64, generator=made)
    now.requires_grad_()
    loss(now, old, advantages, weights.abs()).backward()
    step = 1e-6
    for at in range(5):
        move = torch.zeros(5, dtype=torch.float64)
        move[at] = step
        with torch.no_grad():
            up, down = (loss(now + sign * move, old, advantages, weights.abs()) for sign in (1, -1))
        # Two sides of a kink differ: hypothesis does not land on one, but may come within a step of it.
        slope = float((up - down) / (2 * step))
        assert now.grad is not None
        assert float(now.grad[at]) == pytest.approx(slope, abs=1e-4)


@given(rows)
def test_the_gradient_of_tis_is_that_of_the_log_prob_alone(found: list[tuple[float, float, float, float]]) -> None:
    now, old, advantages, weights = columns(found)
    now.requires_grad_()
    loss_of(batch_of(now, old, advantages, weights, loss="tis", cap=1.2)).backward()
    wanted = [-w * min(math.exp(n - o), 1.2) * a for n, o, a, w in found]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx(wanted, abs=1e-12)


sequenced = st.lists(
    st.lists(st.tuples(log_prob, log_prob, st.floats(-2, 2)), min_size=1, max_size=4), min_size=1, max_size=4
)


def per_sequence(found: list[list[tuple[float, float, float]]]) -> tuple[list[Tensor], list[int]]:
    """Targets of several sequences, each sequence with the advantage of its first target, weighted alike."""
    flat = [(now, old, one[0][2], 1 / (len(found) * len(one))) for one in found for now, old, _ in one]
    return columns(flat), [at for at, one in enumerate(found) for _ in one]


@given(sequenced, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_gspo_clips_the_ratio_of_a_whole_sequence(
    found: list[list[tuple[float, float, float]]], low: float, high: float
) -> None:
    wanted = 0.0
    for one in found:
        ratio = math.exp(math.fsum(now - old for now, old, _ in one) / len(one))
        advantage = one[0][2]
        wanted -= min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage) / len(found)
    given, which = per_sequence(found)
    batch = batch_of(*given, sequence=which, loss="gspo", clip=low, clip_high=high)
    assert float(loss_of(batch)) == pytest.approx(wanted, abs=1e-9)


@given(sequenced)
def test_the_gradient_of_gspo_is_that_of_the_sequences_ratio(found: list[list[tuple[float, float, float]]]) -> None:
    (now, old, advantages, weights), which = per_sequence(found)
    now.requires_grad_()
    loss_of(batch_of(now, old, advantages, weights, sequence=which, loss="gspo", clip=1.0, clip_high=100.0)).backward()
    plain = now.detach().clone().requires_grad_()
    whole = torch.zeros((), dtype=torch.float64)
    for at, one in enumerate(found):
        here = torch.tensor(which) == at
        whole = whole - torch.exp((plain - old)[here].mean()) * one[0][2] / len(found)
    whole.backward()
    assert now.grad is not None
    assert plain.grad is not None
    assert torch.allclose(now.grad, plain.grad, atol=1e-12)


def test_a_sequence_beyond_gspos_clip_has_no_gradient_and_its_targets_count_as_clipped() -> None:
    now = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.4, -1.2, -1.0], dtype=torch.float64)
    given = (now, old, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    loss, metrics = losses.gspo(batch_of(*given, sequence=[0, 0, 1], loss="gspo"))
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0, 0, -1])
    assert metrics["clip_fraction"].tolist() == [True, True, False]


@given(rows, st.floats(0.05, 1), st.floats(0.05, 3))
def test_cispo_holds_the_weight_and_keeps_the_gradient(
    found: list[tuple[float, float, float, float]], low: float, high: float
) -> None:
    now, old, advantages, weights = columns(found)
    now.requires_grad_()
    loss = loss_of(batch_of(now, old, advantages, weights, loss="cispo", clip=low, clip_high=high))
    held = [w * clip(math.exp(n - o), 1 - low, 1 + high) * a for n, o, a, w in found]
    assert float(loss.detach()) == pytest.approx(
        -math.fsum(h * n for h, (n, *_) in zip(held, found, strict=True)), abs=1e-9
    )
    loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-h for h in held], abs=1e-12)


def test_tis_is_against_what_sampled_whatever_the_ratios_are_against() -> None:
    now, old, rollout = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.1, -1.3))
    one = torch.ones(1, dtype=torch.float64)
    found = loss_of(batch_of(now, old, one, one, rollout=rollout, loss="tis"))
    assert float(found) == pytest.approx(math.exp(0.3))


@given(rows)
def test_sft_is_the_weighted_negative_log_likelihood(found: list[tuple[float, float, float, float]]) -> None:
    wanted = -math.fsum(now * weight for now, _, _, weight in found)
    assert float(loss_of(batch_of(*columns(found), loss="sft"))) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_a_sum_over_sequences_and_has_a_gradient(name: str) -> None:
    """What a user's loss is held to."""
    algorithm = AlgorithmConfig(loss=name)
    check_loss(LOSSES[name], algorithm)


def test_the_table_of_losses_is_what_a_configuration_may_name() -> None:
    assert tuple(LOSSES) == NAMES


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, (0.2, 0.2)),
        ({"clip": 0.1}, (0.1, 0.1)),
        ({"clip_high": 0.28}, (0.2, 0.28)),
        ({"loss": "gspo"}, (3e-4, 4e-4)),
        ({"loss": "cispo"}, (1.0, 4.0)),
        ({"loss": "cispo", "clip": 0.3, "clip_high": 2.0}, (0.3, 2.0)),
    ],
)
def test_clips_are_those_that_are_set_or_usual(given: dict[str, object], wanted: tuple[float, float]) -> None:
    assert AlgorithmConfig.model_validate(given).clips == wanted
