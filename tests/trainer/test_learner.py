"""The learner, against an implementation of its own: one sequence at a time, in float64, by formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.kit import sequence

from headrace import Sequence
from headrace.trainer.advantages import gae
from headrace.trainer.config import TrainerConfig
from headrace.trainer.examples import rewards_at
from headrace.trainer.learner import Learner


def learner(model: Path, **changes: Any) -> Learner:
    optimizer = {"lr": 1e-3, "max_grad_norm": 1e9, **changes.pop("optimizer", {})}
    config = TrainerConfig(model=model, run=model, optimizer=optimizer, **changes)
    return Learner(config, "cpu")


def several(count: int = 5, **changes: Any) -> list[Sequence]:
    rng = np.random.default_rng(3)
    made = []
    for at in range(count):
        spans = [(2, 5), (7, 7 + int(rng.integers(1, 6)))]
        found = sequence(spans, advantage=float(rng.normal()), seed=at, vocabulary=300, uid=f"t{at}", **changes)
        made.append(
            replace(
                found, log_probs=np.where(found.loss_mask, -5.9 + 0.5 * rng.random(len(found)), 0).astype(np.float32)
            )
        )
    return made


def log_probs(model: Any, one: Sequence) -> torch.Tensor:
    """Of the targets of one sequence, in float64, with transformers' own attention."""
    ids = torch.from_numpy(one.tokens.astype(np.int64))
    heat = torch.ones(len(ids), dtype=torch.float64)
    for span in one.spans:
        heat[span.start : span.end] = span.temperature
    logits = model(input_ids=ids[None]).logits[0, :-1] / heat[1:, None]
    found = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(one.loss_mask[1:])]


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()


def ppo_by_hand(model: Any, sequences: list[Sequence], clip: float = 0.2) -> torch.Tensor:
    total = sum(int(one.loss_mask.sum()) for one in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for one in sequences:
        assert one.advantages is not None
        ratio = torch.exp(log_probs(model, one) - torch.from_numpy(one.log_probs[one.loss_mask]).double())
        advantage = torch.from_numpy(one.advantages[one.loss_mask]).double()
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum() / total
    return loss


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


class Watched(torch.optim.SGD):
    """Keeps what it was told to step along."""

    seen: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        self.seen = torch.cat([p.grad.double().flatten() for p in group["params"]])


@pytest.mark.parametrize("tokens", [4096, 16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_formula(model: Path, tokens: int, temperature: float) -> None:
    sequences = several(temperature=temperature)
    mine = learner(model, optimizer={"tokens": tokens})
    mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
    told = mine.learn(sequences, 0, 0)
    theirs = reference(model)
    loss = ppo_by_hand(theirs, sequences)
    loss.backward()
    assert told["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert watched.seen is not None
    assert torch.allclose(watched.seen, gradients(theirs), atol=1e-5)
    assert float(watched.seen.abs().max()) > 1e-3


def test_the_gradient_of_the_policy_is_a_finite_difference(model: Path) -> None:
    sequences = several(2)
    theirs = reference(model)
    ppo_by_hand(theirs, sequences).backward()
    weight = theirs.model.layers[0].mlp.down_proj.weight
    steepest = weight.grad.abs().flatten().topk(3).indices.tolist()
    for at in [divmod(place, weight.shape[1]) for place in steepest]:
        step = 1e-3  # transformers' norms are float32: a smaller step would measure their rounding
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[at] += sign * step
                found.append(float(ppo_by_hand(theirs, sequences)))
                weight[at] -= sign * step
        assert float(weight.grad[at]) == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-2)


def test_minibatches_update_one_after_the_other(model: Path) -> None:
    told = learner(model, optimizer={"minibatches": 3, "epochs": 2}).learn(several(6), 0, 0)
    assert told["updates"] == 6


def test_the_shuffle_depends_on_seed_and_step_alone(model: Path) -> None:
    ones = learner(model, optimizer={"minibatches": 3})
    assert list(ones._minibatches(9, 4)) == list(ones._minibatches(9, 4))
    assert list(ones._minibatches(9, 4)) != list(ones._minibatches(9, 5))


def test_tis_learns_by_its_formula(model: Path) -> None:
    sequences = several()
    mine = learner(model, algorithm={"loss": "tis", "cap": 1.1})
    mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
    mine.learn(sequences, 0, 0)
    theirs = reference(model)
    total = sum(int(one.loss_mask.sum()) for one in sequences)
    for one in sequences:
        assert one.advantages is not None
        now = log_probs(theirs, one)
        old = torch.from_numpy(one.log_probs[one.loss_mask]).double()
        importance = torch.exp(now.detach() - old).clamp(max=1.1)
        (-(importance * torch.from_numpy(one.advantages[one.loss_mask]) * now).sum() / total).backward()
    assert watched.seen is not None
    assert torch.allclose(watched.seen, gradients(theirs), atol=1e-5)


def test_against_the_weights_before_the_batch_every_ratio_begins_at_one(model: Path) -> None:
    sequences = several()
    mine = learner(model, algorithm={"old": "proximal", "cap": 1.05})
    with torch.no_grad():
        before, _ = mine._fixed(sequences)
    theirs = reference(model)
    assert before.importance is not None
    for one, old, importance in zip(sequences, before.old, before.importance, strict=True):
        now = log_probs(theirs, one).detach()
        assert torch.allclose(old.double(), now, atol=1e-5)
        wanted = torch.exp(now - torch.from_numpy(one.log_probs[one.loss_mask])).clamp(max=1.05)
        assert torch.allclose(importance.double(), wanted, atol=1e-5)


def test_a_token_without_a_recorded_log_prob_counts_as_just_sampled(model: Path) -> None:
    sequences = several()
    sequences[0].log_probs[2] = np.nan
    mine = learner(model)
    with torch.no_grad():
        before, _ = mine._fixed(sequences)
    now = log_probs(reference(model), sequences[0]).detach()
    assert before.old[0][0].item() == pytest.approx(now[0].item(), abs=1e-5)
    assert math.isfinite(mine.learn(sequences, 0, 0)["loss"])


def test_the_kl_to_the_reference_is_zero_where_training_begins_and_grows(model: Path) -> None:
    mine = learner(model, algorithm={"kl": 0.1}, optimizer={"lr": 1e-2})
    assert mine.learn(several(), 0, 0)["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert mine.learn(several(), 1, 1)["reference_kl"] > 1e-4


def test_an_entropy_bonus_keeps_the_policy_more_uncertain(model: Path) -> None:
    ends = []
    for bonus in (0.0, 1.0):
        mine = learner(model, algorithm={"entropy": bonus}, optimizer={"lr": 1e-2})
        for step in range(8):
            told = mine.learn(several(), step, step)
        ends.append(told["entropy"])
    assert ends[1] > ends[0] + 0.01


def test_gae_hands_out_normalised_advantages_of_the_critics_values(model: Path) -> None:
    sequences = several(rewards=[0.5, 1.0], reward=1.5)
    mine = learner(model, algorithm={"advantage": "gae", "gamma": 0.9, "lam": 0.8})
    assert mine.critic is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(mine.critic.head.weight)
    with torch.no_grad():
        before, estimated = mine._fixed(sequences)
    assert before.values is not None
    raw = []
    for one, values in zip(sequences, before.values, strict=True):
        raw.append(gae(rewards_at(one)[one.loss_mask], values.double().numpy(), 0.9, 0.8)[0])
    every = np.concatenate(raw)
    for one, wanted in zip(estimated, raw, strict=True):
        assert one.advantages is not None
        assert one.advantages[one.loss_mask] == pytest.approx((wanted - every.mean()) / every.std(), abs=1e-4)


def test_the_critic_learns_what_is_to_come(model: Path) -> None:
    sequences = several(reward=1.0)
    config = {"algorithm": {"advantage": "gae", "lam": 1.0}, "critic": {"lr": 1e-2, "clip": 10.0}}
    mine = learner(model, **config)
    losses = [mine.learn(sequences, step, step)["value_loss"] for step in range(12)]
    assert losses[-1] < 0.1 * losses[0]


def test_while_the_critic_warms_up_the_policy_stays(model: Path) -> None:
    mine = learner(model, algorithm={"advantage": "gae"}, critic={"warmup_steps": 1})
    before = {name: tensor.clone() for name, tensor in mine.policy.weights().items()}
    mine.learn(several(reward=1.0), 0, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.policy.weights().items())
    mine.learn(several(reward=1.0), 1, 0)
    assert any(not torch.equal(before[name], tensor) for name, tensor in mine.policy.weights().items())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_computes_nearly_the_same(model: Path) -> None:
    exact = learner(model).learn(several(), 0, 0)
    rough = learner(model, dtype="bfloat16").learn(several(), 0, 0)
    assert rough["loss"] == pytest.approx(exact["loss"], abs=0.05)
    assert rough["loss"] != exact["loss"]


def test_logits_in_parts_give_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learner(model).learn(several(), 0, 0)
    monkeypatch.setattr("headrace.trainer.logits.MAX_LOGITS", 365 * 4)
    parts = learner(model).learn(several(), 0, 0)
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


def test_an_update_that_is_not_finite_is_left_out_and_counted(model: Path) -> None:
    sequences = several()
    sequences[0].log_probs[2] = -np.inf
    mine = learner(model)
    before = {name: tensor.clone() for name, tensor in mine.policy.weights().items()}
    assert mine.learn(sequences, 0, 0)["updates_not_finite"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.policy.weights().items())


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0.5, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5]), ("cosine", [0.5, 1, 1])],
)
def test_the_rate_warms_up_and_falls(model: Path, schedule: str, rates: list[float]) -> None:
    mine = learner(model, steps=6, optimizer={"lr": 1.0, "warmup_steps": 2, "schedule": schedule})
    assert [mine._rate(step) for step in range(len(rates))] == pytest.approx(rates)
